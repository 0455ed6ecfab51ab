"""What the tests of `jax-attn port` share: the command, and small files."""

import numpy as np
from click.testing import CliRunner

from helpers.transfer.torch_checkpoints import bert, saved, tensors
from jax_attn.cli import main


def ported(source, target, to, *options, status=0):
    done = CliRunner().invoke(main, ["port", *map(str, (source, target, "--to", to, *options))])
    assert done.exit_code == status, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)  # no traceback
    return done


def source_of(tmp_path, held, config):
    """A folder of these tensors, by name: tmp_path / "source"."""
    (tmp_path / "source").mkdir()
    saved(tmp_path / "source", held, config)
    return tmp_path / "source"


def plain(tmp_path, dtype="float32", layers=2):
    config = {"num_attention_heads": 6, "hidden_size": 30, "num_hidden_layers": layers}
    return source_of(tmp_path, tensors(bert(layers), dtype), config)


D, N, K, H, V = 31, 6, 3, 5, 11
LLAMA = {"model_type": "llama", "hidden_size": D, "num_attention_heads": N, "head_dim": H}
LLAMA |= {"num_key_value_heads": K, "num_hidden_layers": 2, "intermediate_size": 7}


def llama(dtype="float32"):
    """The tensors of such a model, 21 of them."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes["lm_head.weight"] = (V, D)
    for i in range(2):
        at = f"model.layers.{i}"
        rows = {"q_proj": (N * H, D), "k_proj": (K * H, D), "v_proj": (K * H, D)}
        rows["o_proj"] = (D, N * H)
        shapes |= {f"{at}.self_attn.{name}.weight": shape for name, shape in rows.items()}
        shapes |= {
            f"{at}.{n}.weight": (D,) for n in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{at}.mlp.{n}_proj.weight": (7, D) for n in ("up", "gate")}
        shapes[f"{at}.mlp.down_proj.weight"] = (D, 7)
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}
