"""What a transfer refuses, how it says so, and that nothing is written then."""

import pickle
import time

import numpy as np
import pytest
import torch
from flax import nnx

from helpers.transfer.small_model import (
    LAYERS,
    MODEL,
    NARROW,
    VOCAB,
    WIDE,
    D,
    H,
    N,
    bits,
    model,
    problems_of,
    torch_tensors,
)
from jax_attn import transfer
from jax_attn.families import FAMILIES
from jax_attn.transfer import EMBEDDING, LINEAR, Layout, TransferError, heads, linear, row

UP = "h.1.mlp.up.weight"
NORM = "h.1.ln.weight"
WTE = "wte.weight"
BAD_TENSORS = {  # tensors -> (kind, name) of every problem, and what the message must say
    "missing": (
        {UP: None},
        [("missing", UP)],
        'row("h.1.mlp.up.weight", "layers.1.up.kernel", linear)',
    ),
    "missing, one letter off": (
        {UP: None, "h.1.mlp.upp.weight": torch.ones(WIDE, D)},
        [("missing", UP), ("unexpected", "h.1.mlp.upp.weight")],
        "nearest: h.1.mlp.upp.weight",
    ),
    "unexpected": (
        {"h.1.rotary.inv_freq": torch.ones(H)},
        [("unexpected", "h.1.rotary.inv_freq")],
        "no row takes it",
    ),
    "a layer too many": (
        {"h.3.ln.weight": torch.ones(D)},
        [("unexpected", "h.3.ln.weight")],
        "layers.3.norm.scale, which the module lacks",
    ),
    "a layer spelt otherwise": (
        {"h.01.ln.weight": torch.ones(D)},
        [("unexpected", "h.01.ln.weight")],
        "nearest: h.1.ln.weight",
    ),
    "a bias that the module lacks": (
        {"h.1.mlp.up.bias": torch.ones(WIDE)},
        [("unexpected", "h.1.mlp.up.bias")],
        "build the module with biases",
    ),
    "wrong shape": (
        {UP: torch.ones(NARROW, D)},
        [("wrong shape", UP)],
        "expected [13, 30] for layers.1.up.kernel [30, 13], got [7, 30]",
    ),
    "transposed": ({UP: torch.ones(D, WIDE)}, [("wrong shape", UP)], "got [30, 13]"),
    "a scalar": ({UP: torch.tensor(1.0)}, [("wrong shape", UP)], "got []"),
    "wrong dtype": (
        {UP: torch.ones(WIDE, D, dtype=torch.bfloat16)},
        [("wrong dtype", UP)],
        "param_dtype=bfloat16",
    ),
    "wider dtype": (
        {UP: torch.ones(WIDE, D, dtype=torch.float64)},
        [("wrong dtype", UP)],
        "expected float32",
    ),
    "integers": ({UP: np.ones((WIDE, D), np.int32)}, [("wrong dtype", UP)], "got int32"),
    "meta": ({UP: torch.ones(WIDE, D, device="meta")}, [("unreadable", UP)], "meta device"),
    "sparse": ({UP: torch.ones(WIDE, D).to_sparse()}, [("unreadable", UP)], ".to_dense()"),
    "objects": (
        {UP: np.full((WIDE, D), None)},
        [("unreadable", UP)],
        "expected numbers, got dtype object",
    ),
    "a list": (
        {UP: [[1.0] * D] * WIDE},
        [("unreadable", UP)],
        "expected a NumPy, JAX or torch tensor, got list",
    ),
    "a key that is no string": ({7: torch.ones(2)}, [("unreadable", "7")], "a string as key"),
    "several at once": (
        {UP: None, WTE: torch.ones(D, VOCAB), NORM: torch.ones(D).half(), "x": torch.ones(2)},
        [("missing", UP), ("wrong shape", WTE), ("unexpected", "x"), ("wrong dtype", NORM)],
        "4 problems",
    ),
}


@pytest.mark.parametrize(("change", "expected", "says"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors_are_named_and_nothing_is_written(change, expected, says, loaded):
    tensors = {key: t for key, t in {**torch_tensors(), **change}.items() if t is not None}
    before = bits(loaded)
    found, message = problems_of(lambda: transfer.load(loaded, tensors, MODEL))
    assert found == expected
    assert says in message
    assert bits(loaded) == before
    assert [(p.kind, p.name) for p in transfer.plan(loaded, tensors, MODEL).problems] == expected


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that it will drop quantisation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_tensors_are_refused():
    whole = torch.ones(WIDE, D)
    quantised = torch.quantize_per_tensor(whole, scale=0.1, zero_point=0, dtype=torch.qint8)
    found, message = problems_of(
        lambda: transfer.load(model(), torch_tensors() | {UP: quantised}, MODEL)
    )
    assert found == [("unreadable", UP)]
    assert ".dequantize()" in message


def test_a_parameter_that_no_row_writes():
    layout = Layout(*(g for g in MODEL.groups if "up" not in str(g)))
    tensors = {key: t for key, t in torch_tensors().items() if "up" not in key}
    found, _ = problems_of(lambda: transfer.load(model(), tensors, layout))
    assert found == [("unwritten", f"layers.{i}.up.kernel") for i in range(LAYERS)]


def test_the_row_that_would_mend_it_is_proposed():
    layout = Layout(*(g for g in MODEL.groups if "k_proj" not in str(g) and "up" not in str(g)))
    _, message = problems_of(lambda: transfer.load(model(), torch_tensors(), layout))
    for proposed in (
        'row("h.0.mlp.up.weight", "layers.0.up.kernel", linear)',
        'row("h.0.self_attention.k_proj.weight", "layers.0.attn.key.kernel", linear, heads)',
        'row("h.0.self_attention.k_proj.bias", "layers.0.attn.key.bias", heads)',
    ):
        assert f"{proposed} would take it" in message
    mended = layout + Layout(
        row("h.{i}.mlp.up.weight", "layers.{i}.up.kernel", linear),
        row("h.{i}.self_attention.k_proj.weight", "layers.{i}.attn.key.kernel", linear, heads),
        row("h.{i}.self_attention.k_proj.bias", "layers.{i}.attn.key.bias", heads),
    )
    transfer.load(model(), torch_tensors(), mended)


WRAPPERS = {"module": "DataParallel", "_orig_mod": "torch.compile", "_fsdp_wrapped_module": "Fully"}


@pytest.mark.parametrize(("prefix", "author"), WRAPPERS.items())
def test_a_wrapper_s_prefix_is_recognised(prefix, author):
    tensors = {f"{prefix}.{key}": t for key, t in torch_tensors().items()}
    _, message = problems_of(lambda: transfer.load(model(), tensors, MODEL))
    assert author in message
    assert f'layout.under("{prefix}", "")' in message
    transfer.load(model(), tensors, MODEL.under(prefix, ""))


class Inside(nnx.Module):
    """The small model as a part of another."""

    def __init__(self):
        self.core = model()


@pytest.mark.parametrize(
    ("module", "prefixes"),
    [(model, ("encoder.h", "")), (Inside, ("", "core")), (Inside, ("encoder", "core"))],
)
def test_a_prefix_that_the_table_lacks_is_the_only_problem(module, prefixes):
    in_torch, _ = prefixes
    keys = {key: f"{in_torch}.{key}".removeprefix(".") for key in torch_tensors()}
    tensors = {keys[key]: tensor for key, tensor in torch_tensors().items()}
    problems, message = problems_of(lambda: transfer.load(module(), tensors, MODEL))
    assert [name for _, name in problems] == [in_torch or prefixes[1]]
    assert 'use layout.under("{}", "{}")'.format(*prefixes) in message
    transfer.load(module(), tensors, MODEL.under(*prefixes))


DOUBLED = {
    "two keys onto one path": (
        MODEL + Layout(row("wpe.weight", "tokens.embedding")),
        {"wpe.weight": torch.ones(VOCAB, D)},
        ("doubly written", "tokens.embedding"),
    ),
    "one row twice": (MODEL + EMBEDDING.under("wte", "tokens"), {}, ("doubly written", WTE)),
}


@pytest.mark.parametrize(("layout", "more", "expected"), DOUBLED.values(), ids=DOUBLED)
def test_doubly_written(layout, more, expected):
    found, message = problems_of(lambda: transfer.load(model(), torch_tensors() | more, layout))
    assert expected in found
    assert "expected one row" in message


def test_two_paths_onto_one_key(loaded):
    layout = Layout(
        *(g for g in MODEL.groups if "norm.bias" not in str(g)),
        row("h.{layer}.ln.weight", "layers.{layer}.norm.bias"),
    )
    found, _ = problems_of(lambda: transfer.export(loaded, layout))
    assert ("doubly written", "h.1.ln.weight") in found


def test_export_leaves_no_parameter_behind(loaded):
    layout = Layout(*(g for g in MODEL.groups if "scale" not in str(g)))
    found, _ = problems_of(lambda: transfer.export(loaded, layout))
    assert found == [("unexpected", f"layers.{i}.norm.scale") for i in range(LAYERS)]


@pytest.mark.slow
def test_a_hopeless_pairing_is_told_quickly():
    """Names are compared with each other for hints: not each with each in a big model."""
    shapes = {f"l.{i}.attn.{name}_proj.kernel": (D, N, H) for i in range(300) for name in "qkv"}
    weight = np.broadcast_to(np.float32(0), (N * H, D))
    tensors = {path.replace("kernel", "weight"): weight for path in shapes}
    layout = transfer.LAYOUTS["gqa"].under("l.{i}.attn", "x.l.{i}.attn")
    start = time.perf_counter()
    assert len(problems_of(lambda: layout.to_flax(tensors, shapes))[0]) == 2 * len(shapes)
    assert time.perf_counter() - start < 10


WRONG_ARGUMENTS = {
    "a torch module": (lambda: (model(), torch.nn.Linear(2, 3), LINEAR), "pass its state_dict"),
    "a list": (lambda: (model(), [], LINEAR), "tensors: expected a mapping"),
    "a table's name": (lambda: (model(), {}, "gqa"), "layout: expected a Layout"),
    "a family": (
        lambda: (model(), {}, FAMILIES["llama"]),
        r"layout: expected a Layout, got Family; .* transfer\.layout_for\(PATH\) returns that",
    ),
    "no module": (lambda: (torch.nn.Linear(2, 3), {}, LINEAR), "expected an nnx.Module, .* Linear"),
    "a state": (lambda: (nnx.state(model()), {}, LINEAR), "module: expected an nnx.Module"),
}


@pytest.mark.parametrize(("make", "says"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_arguments_of_the_wrong_kind(make, says):
    with pytest.raises(TypeError, match=says):
        transfer.load(*make())


def test_nothing_to_load_is_an_error():
    found, _ = problems_of(lambda: transfer.load(nnx.Dropout(0.5), {}, MODEL))
    assert found == [("missing", "module")]


def test_the_error_prints_the_first_problems_and_survives_pickling():
    tensors = {f"stray.{i}": np.ones(2) for i in range(100)}
    with pytest.raises(TransferError) as error:
        transfer.load(model(), tensors, MODEL)
    assert isinstance(error.value, ValueError)
    hidden = len(error.value.problems) - 30
    assert f"and {hidden} more" in str(error.value)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.problems, str(copy)) == (error.value.problems, str(error.value))
