"""The tables: every design's torch weights are, in Flax, the same projections.

Weights and inputs are small integers, so that every sum is exact and equal means equal.
"""

import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from helpers.transfer.layout_cases import CASES, B, D, N, T, abstract, ours, table
from jax_attn import transfer
from jax_attn.selfcheck.matrix.ports import EmbeddedAttention
from jax_attn.transfer import LAYOUTS, Layout, TransferError, packed, row
from torch_ref.plain_mha import SentenceAttention


def integers(rng, *shape):
    return torch.from_numpy(rng.integers(-8, 9, shape).astype(np.float32))


def with_integer_weights(module):
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(integers(rng, *parameter.shape))
    return module


def assert_same_projections(port, layout):
    """Load through `layout`, then compare q, k, v and the output projection, exactly."""
    reference, module = with_integer_weights(port.torch()), abstract(port.flax)
    transfer.load(module, reference.state_dict(), layout)
    params = {path: np.asarray(array) for path, array in transfer.flatten(module).items()}
    names = {
        name: port.names.get(name, name) for name in ("q_proj", "k_proj", "v_proj", "out_proj")
    }
    rng = np.random.default_rng(1)
    by_width = {width: integers(rng, B, T, width) for width in port.widths}
    inputs = [by_width[width] for width in port.widths]
    expected = port.q_k_v(reference, *inputs)
    for name, x, heads in zip(("q_proj", "k_proj", "v_proj"), inputs, expected, strict=True):
        heads_BTNH = np.einsum("btd,dnh->btnh", x.numpy(), params[f"{names[name]}.kernel"])
        heads_BTNH = heads_BTNH + params.get(f"{names[name]}.bias", 0)
        np.testing.assert_array_equal(heads_BTNH.reshape(B, T, -1), heads.detach())
    kernel_NHD = params[f"{names['out_proj']}.kernel"]
    y_BTNH = integers(rng, B, T, *kernel_NHD.shape[:2])
    y_BTD = np.einsum("btnh,nhd->btd", y_BTNH.numpy(), kernel_NHD)
    y_BTD = y_BTD + params.get(f"{names['out_proj']}.bias", 0)
    np.testing.assert_array_equal(y_BTD, getattr(reference, port.out)(y_BTNH.flatten(2)).detach())


def test_every_design_has_a_table():
    assert LAYOUTS.keys() == torch_ref.DESIGNS.keys()
    assert {port.design for port in CASES.values()} == LAYOUTS.keys()


@pytest.mark.parametrize("port", CASES.values(), ids=CASES)
def test_projects_as_torch_does(port):
    assert_same_projections(port, table(port))


def without_steps(layout, *names):
    """The table with every step of these names struck out."""
    return Layout(
        *(
            row(r.keys, r.paths, *(step for step in r.steps if step.name not in names))
            for group in layout.groups
            for r in group.alternatives[0]
        )
    )


QVK = ("q_proj", "v_proj", "k_proj")
WRONG_TABLES = {
    "square kernels not transposed": ("masked_mha", without_steps(LAYOUTS["masked_mha"], "linear")),
    "keys and values swapped": (
        "masked_mha",
        LAYOUTS["masked_mha"].renamed({"k_proj": "v_proj", "v_proj": "k_proj"}),
    ),
    "queries and keys swapped, widths equal": (
        "plain_mha",
        LAYOUTS["plain_mha"].renamed({"k_proj": "q_proj", "q_proj": "k_proj"}),
    ),
    "packed in the order q, v, k": (
        "fused_mha",
        LAYOUTS["fused_mha"].renamed({"k_proj": "v_proj", "v_proj": "k_proj"}),
    ),
    "packed biases in the order q, v, k": (
        "torch_mha",
        Layout(
            row(
                "in_proj_weight",
                [f"{p}.kernel" for p in ("q_proj", "k_proj", "v_proj")],
                packed,
                transfer.linear,
                transfer.heads,
            ),
            row("in_proj_bias", [f"{p}.bias" for p in QVK], packed, transfer.heads),
            transfer.FROM_HEADS.under("out_proj", "out_proj"),
        ),
    ),
}


@pytest.mark.parametrize(("design", "layout"), WRONG_TABLES.values(), ids=WRONG_TABLES)
def test_a_wrong_table_is_seen(design, layout):
    """These tables fit every shape: only the comparison of projections can tell."""
    with pytest.raises(AssertionError, match="not equal"):
        assert_same_projections(CASES[design], layout)


def test_the_pipeline_is_a_composed_table():
    reference = with_integer_weights(SentenceAttention(7, D, N))
    module = nnx.eval_shape(lambda: EmbeddedAttention(7, D, N, rngs=nnx.Rngs(0)))
    transfer.load(module, reference.state_dict(), transfer.PLAIN_PIPELINE)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 0]])
    embedded = np.asarray(transfer.flatten(module)["embedding.embedding"])[tokens.numpy()]
    np.testing.assert_array_equal(embedded, reference.embedding(tokens).detach())
    exported = transfer.export(module, transfer.PLAIN_PIPELINE)
    for key, tensor in reference.state_dict().items():
        np.testing.assert_array_equal(exported[key], tensor.numpy(), strict=True)


@pytest.mark.parametrize("one", [True, False])
def test_a_learned_key_on_one_side_alone_is_told_by_name(one):
    reference = torch_ref.DESIGNS["torch_mha"](D, N, add_bias_kv=one)
    module = abstract(ours(add_bias_kv=not one))
    with pytest.raises(TransferError) as error:
        transfer.load(module, reference.state_dict(), LAYOUTS["torch_mha"])
    assert {"bias_k", "bias_v"} <= {problem.name for problem in error.value.problems}


def test_a_module_with_biases_wants_biases():
    tensors = torch_ref.DESIGNS["torch_mha"](D, N, bias=False).state_dict()
    with pytest.raises(TransferError) as error:
        transfer.load(abstract(ours()), tensors, LAYOUTS["torch_mha"])
    found = [(p.kind, p.name) for p in error.value.problems]
    assert found == [("missing", "in_proj_bias"), ("missing", "out_proj.bias")]
    assert "build the module without" in str(error.value)


def test_a_projection_alone_may_have_no_bias():
    """As Whisper's keys: nothing stands for it on either side."""
    tensors = dict(torch_ref.DESIGNS["masked_mha"](D, N).state_dict())
    del tensors["W_K.bias"]
    module = abstract(ours(use_bias=("q_proj", "v_proj")))
    transfer.load(module, tensors, LAYOUTS["masked_mha"])
    back = transfer.export(module, LAYOUTS["masked_mha"])
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[key], tensors[key]) for key in tensors)


def test_a_module_without_biases_takes_none():
    tensors = torch_ref.DESIGNS["masked_mha"](D, N).state_dict()
    with pytest.raises(TransferError) as error:
        transfer.load(abstract(ours(use_bias=False)), tensors, LAYOUTS["masked_mha"])
    found = {(p.kind, p.name) for p in error.value.problems}
    assert found == {("unexpected", f"W_{letter}.bias") for letter in "QKVO"}


@pytest.mark.parametrize(
    ("layout", "key", "shown"),
    [
        (LAYOUTS["masked_mha"], "W_Q.weight", "W_Q.weight -> q_proj.kernel [linear heads]"),
        (LAYOUTS["gqa"], "out_proj.bias", "out_proj.bias -> out_proj.bias [=]"),
        (
            LAYOUTS["torch_mha"],
            "in_proj_bias",
            "in_proj_bias -> q_proj.bias, k_proj.bias, v_proj.bias [packed heads]",
        ),
        (
            LAYOUTS["gqa"].under("layers.{layer}.attn", "blocks.{layer}"),
            "layers.3.attn.k_proj.bias",
            "layers.3.attn.k_proj.bias -> blocks.3.k_proj.bias [heads]",
        ),
    ],
)
def test_the_row_of_a_key_is_shown(layout, key, shown):
    assert layout.row_of(key) == shown


def test_a_key_of_no_row_is_an_error():
    with pytest.raises(ValueError, match=r"torch_key: .*'q_proj.wait'; nearest: q_proj.weight"):
        LAYOUTS["gqa"].row_of("q_proj.wait")
