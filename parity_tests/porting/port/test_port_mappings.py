"""What `jax-attn port` says of a mapping that is wrong, and of numbers that are none: one message
names everything, and nothing is written.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from helpers.transfer.port_cases import LLAMA, D, H, K, N, V, llama, ported, source_of
from jax_attn.transfer import load_checkpoint

Q = "model.layers.1.self_attn.q_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def without(*keys):
    return lambda held: {key: array for key, array in held.items() if key not in keys}


def having(**more):
    return lambda held: held | {key.replace("__", "."): array for key, array in more.items()}


def under(prefix):
    return lambda held: {f"{prefix}{key}": array for key, array in held.items()}


def inside(wrappers):
    """Wrappers around every layer, whose keys are `model.layers.0.….weight`."""
    return lambda held: {
        re.sub(r"(layers\.\d)", rf"\1.{wrappers}", key): array for key, array in held.items()
    }


def holding(key, *values):
    """The tensor at `key` with its first numbers replaced."""

    def change(held):
        array = held[key].copy()
        array.reshape(-1)[: len(values)] = values
        return held | {key: array}

    return change


def shaped(shape, *keys):
    """Ones of another shape at `keys`."""
    return lambda held: held | dict.fromkeys(keys, np.ones(shape, "f4"))


def biases(*names):
    return lambda held: (
        held
        | {
            f"model.layers.{i}.self_attn.{n}_proj.bias": np.ones(N * H if n == "q" else K * H, "f4")
            for n in names
            for i in range(2)
        }
    )


def same(held):
    return held


@dataclass(frozen=True)
class Bad:
    """A change of Llama's tensors, options, changes of its config; what must be said."""

    change: Callable = same
    options: tuple[str, ...] = ()
    config: dict = field(default_factory=dict)
    said: tuple[str, ...] = ()
    dtype: str = "float32"


BAD = {
    "a missing key": Bad(without(Q), said=("missing", Q, "layer 1 lacks it")),
    "a missing layer": Bad(
        lambda held: {k: a for k, a in held.items() if ".0." not in k},
        said=("expected layers 0 to 1", "expected attention in 2 layers"),
    ),
    "fewer layers than the config has": Bad(
        config={"num_hidden_layers": 3}, said=("expected attention in 3 layers", "none in [2]")
    ),
    "an unexpected key": Bad(
        having(model__stray=np.ones(3, "f4")), said=("unexpected", "'model.stray'", "no row takes")
    ),
    "a key that is nearly right": Bad(
        lambda held: {k.replace("1.self_attn.q_p", "1.self_attn.p_"): a for k, a in held.items()},
        said=(Q, "nearest: model.layers.1.self_attn.p_roj.weight"),
    ),
    "a buffer": Bad(
        having(model__position_ids=np.arange(7)), said=("'model.position_ids'", "no row takes it")
    ),
    "a prefix of DataParallel": Bad(
        under("module."),
        said=(
            "1 problem",
            "torch.nn.DataParallel added this to 21 of 21",
            "--strip module.",
        ),
    ),
    "a prefix of torch.compile": Bad(
        under("_orig_mod."), said=("1 problem", "torch.compile", "--strip _orig_mod.")
    ),
    "prefixes of both": Bad(under("module._orig_mod."), said=("--strip module._orig_mod.",)),
    "a wrapper in each layer": Bad(
        inside("_orig_mod"), said=("1 problem", "torch.compile", "18 of 21", "--strip _orig_mod.")
    ),
    "wrappers of shards, nested": Bad(
        inside("_fsdp_wrapped_module._checkpoint_wrapped_module"),
        said=("1 problem", "--strip _fsdp_wrapped_module._checkpoint_wrapped_module."),
    ),
    "a prefix that is not there": Bad(
        options=("--strip", "modle"), said=("'modle.'", "there are none", "nearest: model.")
    ),
    "two keys that become one": Bad(
        lambda held: held | {f"module.{Q}": held[Q]},
        ("--strip", "module"),
        said=("doubly written", f"all become '{Q}'"),
    ),
    "a wrong shape": Bad(
        lambda held: held | {Q: held[Q][:-1]}, said=("wrong shape", Q, "multiple of head_dim = 5")
    ),
    "a weight of one head less": Bad(
        lambda held: held | {KEY: held[KEY][:-H]}, said=(KEY, "expected 3 heads", "got 2")
    ),
    "a perceptron's weight that is turned": Bad(
        shaped((D, 7), UP),
        said=("1 problem", UP, "[hidden_size = 31, intermediate_size = 7]", "got [7, 31]"),
    ),
    "a norm of two axes": Bad(
        shaped((2, D), NORM), said=("1 problem", NORM, "[hidden_size = 31]", "got [2, 31]")
    ),
    "a norm of another width": Bad(
        shaped((30,), "model.norm.weight"),
        said=("1 problem", "model.norm.weight", "[hidden_size = 31]", "got [30]"),
    ),
    "an embedding of another width": Bad(
        shaped((V, 30), "model.embed_tokens.weight"),
        said=("1 problem", "token_embedding", "hidden_size = 31]", "got [11, 30]"),
    ),
    "a perceptron of two widths": Bad(
        shaped((D, 9), *(f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1))),
        config={"intermediate_size": None},
        said=("2 problems", "mlp.down.kernel: expected [intermediate_size = 7", "got [9, 31]"),
    ),
    "a head of more words": Bad(
        shaped((12, D), "lm_head.weight"),
        said=("1 problem", "lm_head.weight", "vocab_size = 11]", "got [31, 12]"),
    ),
    "a config of more words": Bad(
        config={"vocab_size": 99},
        said=("2 problems", "lm_head.weight", "model.embed_tokens.weight", "[vocab_size = 99"),
    ),
    "a config of a wider perceptron": Bad(
        config={"intermediate_size": 9}, said=("6 problems", UP, "intermediate_size = 9]")
    ),
    "shapes that no row takes, and others": Bad(
        lambda held: shaped((2, D), NORM)(held | {Q: held[Q][:-1]}),
        said=("2 problems", Q, NORM, "expected [31], as 1 of 2 layers have it, got [2, 31]"),
    ),
    "some biases only": Bad(
        biases("q"),
        config={"attention_bias": True},
        said=("layers.0.attention.k_proj.bias", "layers.1.attention.v_proj.bias", "missing"),
    ),
    "biases that the config has not": Bad(
        biases("q", "k", "v"), said=("unexpected", "q_proj.bias", "does not have it")
    ),
    "a norm's bias that no Llama has": Bad(
        having(model__norm__bias=np.ones(D, "f4")), said=("1 problem", "'model.norm.bias'")
    ),
    "perceptrons' biases that the config has not": Bad(
        shaped((7,), *(f"model.layers.{i}.mlp.up_proj.bias" for i in (0, 1))),
        said=("2 problems", "'model.layers.0.mlp.up_proj.bias'", "no row takes"),
    ),
    "no head in a causal language model": Bad(
        without("lm_head.weight"),
        config={"architectures": ["LlamaForCausalLM"]},
        said=("1 problem", "'lm_head.weight'", "an untied head"),
    ),
    "other heads than the config's": Bad(
        options=("--num-heads", "5"), said=("--num-heads", "expected 6", "got 5")
    ),
    "a config of other heads": Bad(
        config={"num_attention_heads": 3}, said=("expected 3 heads of head_dim = 5, got 6",)
    ),
    "a config of no numbers": Bad(
        config={"num_attention_heads": "six"}, said=("num_attention_heads", "got 'six'")
    ),
    "a config of another width": Bad(
        config={"hidden_size": 10**12}, said=(Q, f"expected {10**12} features", "got 31")
    ),
    "a config of scalings that are none": Bad(
        config={"rope_scaling": "linear"}, said=("rope_scaling", "a JSON object, got 'linear'")
    ),
    "a config of a scaling without a name": Bad(
        config={"rope_scaling": {"rope_type": [1]}}, said=("rope_type", "got [1]")
    ),
    "a config of a number that no float holds": Bad(
        config={"rope_theta": 10**400}, said=("rope_theta", "a number above 0")
    ),
    "a config of endless layers": Bad(
        config={"num_hidden_layers": 10**12}, said=(f"expected attention in {10**12} layers",)
    ),
    "a config of layers that are no number": Bad(
        config={"num_hidden_layers": True}, said=("num_hidden_layers", "got True")
    ),
    "more layers than the config has": Bad(
        config={"num_hidden_layers": 1}, said=("unexpected", "in 1 layers", "got it in [1]")
    ),
    "a layer far beyond the others": Bad(
        lambda held: held | {Q.replace("1", "999999999"): held[Q]},
        said=("expected layers 0 to 999999999", "[2, 3, 4, 5, 6, 7, 8, 9]"),
    ),
    "a layer of 5,000 digits": Bad(
        lambda held: held | {Q.replace("1", "9" * 5000): held[Q]}, said=("no row takes it",)
    ),
    "a family that is not known": Bad(
        config={"model_type": "cohere"},
        said=(
            "names one of the supported families",
            "got model_type 'cohere'",
            "OUT --to flax --layout",
        ),
    ),
    "a config that names no family": Bad(
        config={"model_type": None},
        said=("supported families", "llama", "got model_type none", "OUT --to flax --layout"),
    ),
    "a kernel of whole numbers": Bad(
        lambda held: held | {Q: held[Q].astype("int32")},
        said=("1 problem", "wrong dtype", Q, "got int32"),
    ),
    "a norm of true and false": Bad(
        lambda held: held | {NORM: held[NORM] > 0}, said=("1 problem", NORM, "got bool")
    ),
    "NaN": Bad(
        holding(Q, np.nan, np.nan, np.inf), said=("not finite", Q, "2 NaN and 1 infinite of 930")
    ),
    "numbers that float32 rounds": Bad(
        options=("--dtype", "float32"),
        said=("wrong dtype", Q, "930 of 930 change", "--lossy"),
        dtype="float64",
    ),
    "bfloat16 beyond float16": Bad(
        holding(Q, 1e30, -1e30),
        ("--dtype", "float16"),
        said=(Q, "2 of them to infinity", "--lossy"),
        dtype="bfloat16",
    ),
    "a tensor of no heads": Bad(
        lambda held: held | {KEY: held[KEY][:0]}, said=(KEY, "expected 3 heads", "got 0")
    ),
    "a pattern that meets nothing": Bad(
        options=("--ignore", "*.position_ids"), said=("'*.position_ids'", "it matches none")
    ),
    "everything at once": Bad(
        lambda held: having(model__stray=np.ones(3, "f4"))(holding(Q, np.nan)(without(KEY)(held))),
        ("--ignore", "none", "--num-kv-heads", "2"),
        said=("'model.stray'", "'none'", "--num-kv-heads", "1 NaN", KEY),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_mapping_is_one_message_and_nothing_written(tmp_path, name):
    bad = BAD[name]
    source = source_of(tmp_path, bad.change(llama(bad.dtype)), LLAMA | bad.config)
    done = ported(source, tmp_path / "flax", "flax", *bad.options, status=2)
    message = " ".join(done.stderr.split())
    assert message.count("Error: ") == 1
    for word in bad.said:
        assert word in message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


GOOD = {
    "as it is": Bad(),
    "stripped when asked to": Bad(under("module."), ("--strip", "module")),
    "stripped within names": Bad(
        inside("_fsdp_wrapped_module._checkpoint_wrapped_module"),
        ("--strip", "_checkpoint_wrapped_module._fsdp_wrapped_module"),
    ),
    "a buffer passed over": Bad(
        having(model__position_ids=np.arange(7)), ("--ignore", "*.position_ids")
    ),
    "NaN when allowed": Bad(holding(Q, np.nan), ("--allow-nonfinite",)),
    "lossy when asked to": Bad(
        holding(Q, 1e30), ("--dtype", "float16", "--lossy"), dtype="bfloat16"
    ),
    "float64 that float32 holds": Bad(
        lambda held: {k: a.astype("float32").astype("float64") for k, a in held.items()},
        ("--dtype", "float32"),
        dtype="float64",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_same_is_carried_when_that_is_asked_for(tmp_path, name):
    good = GOOD[name]
    source = source_of(tmp_path, good.change(llama(good.dtype)), LLAMA)
    ported(source, tmp_path / "flax", "flax", *good.options)
    assert len(load_checkpoint(tmp_path / "flax")) == 21
