"""The tables: every design's torch weights are, in Flax, the same projections, and come back.

Weights and inputs are small integers, so that every sum is exact and equal means equal.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from jax_attn import nn, transfer
from jax_attn.transfer import FLAX_NAMES, LAYOUTS, Layout, TransferError, packed, row
from torch_ref.plain_mha import SentenceAttention

B, T, N, K, H, D = 2, 5, 6, 3, 5, 30
HEAD_DIM, KDIM, VDIM = 7, 11, 13


def split(*names):
    """q, k, v of a design with one Linear each."""
    return lambda m, x, k, v: tuple(
        getattr(m, name)(array) for name, array in zip(names, (x, k, v), strict=True)
    )


def fused(m, x, k, v):
    """The published form: (B, T, 3, N, H), cut along the third axis."""
    return m.qkv_proj(x).reshape(*x.shape[:2], 3, -1).unbind(2)


def torch_packed(m, x, k, v):
    return torch.nn.functional._in_projection_packed(x, x, x, m.in_proj_weight, m.in_proj_bias)


def torch_apart(m, x, k, v):
    biases = (None,) * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
    weights = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    return tuple(map(torch.nn.functional.linear, (x, k, v), weights, biases))


def flax_mha(**options):
    return lambda dtype: nnx.MultiHeadAttention(
        N, D, decode=False, rngs=nnx.Rngs(0), param_dtype=dtype, **options
    )


def ours(kv_heads=N, **options):
    return lambda dtype: nn.GroupedQueryAttention(
        D, N, kv_heads, rngs=nnx.Rngs(0), param_dtype=dtype, **options
    )


def case(design, q_k_v, out, *args, flax=None, names=None, widths=(D, D, D), **options):
    """One port: a torch design, how it projects, and the Flax module it goes into."""
    return SimpleNamespace(
        design=design,
        torch=lambda: torch_ref.DESIGNS[design](D, N, *args, **options),
        q_k_v=q_k_v,
        out=out,
        flax=flax or ours(),
        names=names or {},
        widths=widths,
    )


WEIGHTS, MASKED, PLAIN, GQA = (
    split("w_q", "w_k", "w_v"),
    split("W_Q", "W_K", "W_V"),
    split("query", "key", "value"),
    split("q_proj", "k_proj", "v_proj"),
)
CASES = {
    "weights_mha": case("weights_mha", WEIGHTS, "w_o"),
    "fused_mha": case("fused_mha", fused, "out_proj"),
    "masked_mha": case("masked_mha", MASKED, "W_O"),
    "mqa": case("mqa", MASKED, "W_O", flax=ours(1)),
    "plain_mha": case("plain_mha", PLAIN, "out"),
    "torch_mha": case("torch_mha", torch_packed, "out_proj"),
    "torch_mha without bias": case(
        "torch_mha", torch_packed, "out_proj", flax=ours(use_bias=False), bias=False
    ),
    "torch_mha with kdim and vdim": case(
        "torch_mha",
        torch_apart,
        "out_proj",
        flax=ours(kdim=KDIM, vdim=VDIM),
        widths=(D, KDIM, VDIM),
        kdim=KDIM,
        vdim=VDIM,
    ),
    "torch_mha with vdim, without bias": case(
        "torch_mha",
        torch_apart,
        "out_proj",
        flax=ours(vdim=VDIM, use_bias=False),
        widths=(D, D, VDIM),
        vdim=VDIM,
        bias=False,
    ),
    "gqa": case("gqa", GQA, "out_proj", K, flax=ours(K)),
    "gqa of other widths": case(
        "gqa",
        GQA,
        "out_proj",
        K,
        flax=ours(K, head_dim=HEAD_DIM, kdim=KDIM, vdim=VDIM),
        widths=(D, KDIM, VDIM),
        head_dim=HEAD_DIM,
        kdim=KDIM,
        vdim=VDIM,
    ),
    "gqa with a bias on the inputs only": case(
        "gqa", GQA, "out_proj", K, flax=ours(K, use_out_bias=False), out_bias=False
    ),
    "gqa with RMSNorm on queries and keys": case(
        "gqa", GQA, "out_proj", K, flax=ours(K, qk_norm=nnx.RMSNorm), qk_norm=torch.nn.RMSNorm
    ),
    "gqa with LayerNorm on queries and keys": case(
        "gqa", GQA, "out_proj", K, flax=ours(K, qk_norm=nnx.LayerNorm), qk_norm=torch.nn.LayerNorm
    ),
    "masked_mha into flax's own": case(
        "masked_mha", MASKED, "W_O", flax=flax_mha(), names=FLAX_NAMES
    ),
    "torch_mha into flax's own": case(
        "torch_mha", torch_packed, "out_proj", flax=flax_mha(), names=FLAX_NAMES
    ),
    "mqa into flax's own": case(
        "mqa", MASKED, "W_O", flax=flax_mha(num_kv_heads=1), names=FLAX_NAMES
    ),
    "gqa into flax's own": case(
        "gqa", GQA, "out_proj", K, flax=flax_mha(num_kv_heads=K), names=FLAX_NAMES
    ),
}


def integers(rng, *shape):
    return torch.from_numpy(rng.integers(-8, 9, shape).astype(np.float32))


def with_integer_weights(module):
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(integers(rng, *parameter.shape))
    return module


def abstract(build, dtype=jnp.float32):
    """The module's shapes without its initialisation, which a transfer replaces anyway."""
    return nnx.eval_shape(lambda: build(dtype))


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


def table(port):
    layout = LAYOUTS[port.design]
    return layout.renamed(port.names) if port.names else layout


def test_every_design_has_a_table():
    assert LAYOUTS.keys() == torch_ref.DESIGNS.keys()
    assert {port.design for port in CASES.values()} == LAYOUTS.keys()


@pytest.mark.parametrize("port", CASES.values(), ids=CASES)
def test_projects_as_torch_does(port):
    assert_same_projections(port, table(port))


@pytest.mark.parametrize("port", CASES.values(), ids=CASES)
def test_a_live_state_dict_comes_back_whole(port):
    reference, module = port.torch(), abstract(port.flax)
    transfer.load(module, reference.state_dict(), table(port))
    exported = transfer.export(module, table(port))
    assert exported.keys() == reference.state_dict().keys()
    for key, tensor in reference.state_dict().items():
        assert exported[key].shape == tuple(tensor.shape)
        assert exported[key].tobytes() == tensor.numpy().tobytes()


def test_a_real_module_is_loaded_as_an_abstract_one_is():
    port = CASES["gqa"]
    made, shape_only = port.flax(jnp.float32), abstract(port.flax)
    tensors = port.torch().state_dict()
    transfer.load(made, tensors, LAYOUTS["gqa"])
    transfer.load(shape_only, tensors, LAYOUTS["gqa"])
    for path, array in transfer.flatten(made).items():
        np.testing.assert_array_equal(array, transfer.flatten(shape_only)[path])


DTYPES = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16, "float64": np.uint64}


def any_bits(shape, dtype, rng):
    """Every kind of number: NaNs with payloads, infinities, subnormals, both zeros."""
    bits = np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
    special = np.array([1 << (8 * bits.itemsize - 1), 0], dtype)  # -0.0 and 0.0
    made = bits.copy()
    made[:2] = special
    return made.reshape(shape)


def torch_bits(bits, dtype):
    signed = bits.view(f"int{8 * bits.itemsize}")
    return torch.from_numpy(signed).view(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("port", CASES.values(), ids=CASES)
def test_round_trip_keeps_every_bit(port, dtype):
    rng = np.random.default_rng(2)
    sources = {
        key: any_bits(tuple(tensor.shape), DTYPES[dtype], rng)
        for key, tensor in port.torch().state_dict().items()
    }
    tensors = {key: torch_bits(bits, dtype) for key, bits in sources.items()}
    with jax.enable_x64(dtype == "float64"):
        module = abstract(port.flax, jnp.dtype(dtype))
        transfer.load(module, tensors, table(port))
        exported = transfer.export(module, table(port))
    assert exported.keys() == sources.keys()
    for key, bits in sources.items():
        assert exported[key].dtype.name == dtype
        assert exported[key].tobytes() == bits.tobytes(), key


@pytest.mark.parametrize("port", CASES.values(), ids=CASES)
def test_arrays_alone_go_both_ways(port):
    """Gradients take this way: no module, no state, the same table."""
    layout = table(port)
    tensors = {key: t.numpy() for key, t in port.torch().state_dict().items()}
    shapes = {p: a.shape for p, a in transfer.flatten(abstract(port.flax)).items()}
    back = layout.to_torch(layout.to_flax(tensors, shapes))
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(back[key], tensor, strict=True)


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
    module = nnx.eval_shape(lambda: nn.SentenceAttention(7, D, N, rngs=nnx.Rngs(0)))
    transfer.load(module, reference.state_dict(), transfer.PLAIN_PIPELINE)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 0]])
    embedded = np.asarray(transfer.flatten(module)["embedding.embedding"])[tokens.numpy()]
    np.testing.assert_array_equal(embedded, reference.embedding(tokens).detach())
    exported = transfer.export(module, transfer.PLAIN_PIPELINE)
    for key, tensor in reference.state_dict().items():
        np.testing.assert_array_equal(exported[key], tensor.numpy(), strict=True)


@pytest.mark.parametrize("key", ["bias_k", "bias_v"])
def test_learnt_keys_and_values_are_refused_by_name(key):
    reference = torch_ref.DESIGNS["torch_mha"](D, N, add_bias_kv=True)
    with pytest.raises(TransferError) as error:
        transfer.load(abstract(ours()), reference.state_dict(), LAYOUTS["torch_mha"])
    assert ("refused", key) in [(p.kind, p.name) for p in error.value.problems]
    assert "add_bias_kv=False" in str(error.value)


def test_packed_and_split_together_are_ambiguous():
    packed_keys = torch_ref.DESIGNS["torch_mha"](D, N).state_dict()
    split_keys = torch_ref.DESIGNS["torch_mha"](D, N, kdim=KDIM).state_dict()
    with pytest.raises(TransferError) as error:
        transfer.load(abstract(ours()), {**packed_keys, **split_keys}, LAYOUTS["torch_mha"])
    (problem,) = error.value.problems
    assert (problem.kind, problem.name) == ("ambiguous", "in_proj_weight")
    for key in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        assert key in problem.text


def test_a_module_with_biases_wants_biases():
    tensors = torch_ref.DESIGNS["torch_mha"](D, N, bias=False).state_dict()
    with pytest.raises(TransferError) as error:
        transfer.load(abstract(ours()), tensors, LAYOUTS["torch_mha"])
    found = [(p.kind, p.name) for p in error.value.problems]
    assert found == [("missing", "in_proj_bias"), ("missing", "out_proj.bias")]
    assert "build the module without" in str(error.value)


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
