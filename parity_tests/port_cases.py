"""What the tests of `jax-attn port` share: the command, a small file, a user's own tables."""

from click.testing import CliRunner
from torch_checkpoints import bert, saved, tensors

from jax_attn.cli import main


def ported(source, target, to, *options, status=0):
    done = CliRunner().invoke(main, ["port", *map(str, (source, target, "--to", to, *options))])
    assert done.exit_code == status, done.output
    return done


def plain(tmp_path, dtype="float32"):
    source = tmp_path / "source"
    source.mkdir()
    config = {"num_attention_heads": 6, "hidden_size": 30, "num_hidden_layers": 2}
    saved(source, tensors(bert(layers=2), dtype), config)
    return source


TABLES = """
from jax_attn.transfer import Layout, heads, heads_in, linear, row

def table(*first):
    at, to = "encoder.layer.{layer}.attention", "layers.{layer}.attn"
    names = {"self.query": "q_proj", "self.key": "k_proj", "self.value": "v_proj"}
    steps = {"q_proj": first}
    return Layout(
        *(row(f"{at}.{t}.weight", f"{to}.{f}.kernel", *steps.get(f, (linear, heads)))
          for t, f in names.items()),
        *(row(f"{at}.{t}.bias", f"{to}.{f}.bias", heads) for t, f in names.items()),
        row(f"{at}.output.dense.weight", f"{to}.out_proj.kernel", linear, heads_in),
        row(f"{at}.output.dense.bias", f"{to}.out_proj.bias"),
    )

RIGHT, TURNED = table(linear, heads), table(heads)
"""
