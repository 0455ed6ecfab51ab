"""`export(…, into=)`: ports of every kind into a torch module, adapters merged or refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity import five_kinds
from jax_attn import transfer
from jax_attn.transfer import LINEAR, Layout, TransferError, ignored, linear, row, tied
from jax_attn.transfer.nnx.adapters import refuse_adapters


def problems_of(act) -> dict[str, str]:
    with pytest.raises(TransferError) as error:
        act()
    return {p.name: p.kind for p in error.value.problems}


@pytest.mark.slow
@pytest.mark.parametrize("kind", five_kinds.KINDS)
def test_a_port_of_every_kind_goes_back_to_the_bit(kind):
    reference, other = five_kinds.reference(), five_kinds.reference()
    port, layout = five_kinds.port(kind, reference), five_kinds.KINDS[kind].layout
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    exported = transfer.export(port, layout, into=other)
    want, got = reference.state_dict(), other.state_dict()
    assert exported.keys() == want.keys()
    assert all(torch.equal(got[key], a) for key, a in want.items())


class Tied(torch.nn.Module):
    def __init__(self, is_tied: bool = True):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 5)
        self.head = torch.nn.Linear(5, 11, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


ONE = {"embed": np.ones((11, 5), np.float32)}
TWO = ONE | {"head": np.zeros((5, 11), np.float32)}
TIED = Layout(row("embed.weight", "embed"), tied("head.weight", "embed.weight"))
APART = Layout(row("embed.weight", "embed"), row("head.weight", "head", linear))


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_row_is_written_under_both_names(is_tied):
    module = Tied(is_tied)
    transfer.export(ONE, TIED, into=module)
    assert torch.equal(module.head.weight, torch.ones(11, 5))


REFUSED = {
    "two arrays for a tied one": (Tied, TWO, APART, {"head.weight": "ambiguous"}),
    "no row": (
        lambda: Tied(False),
        ONE,
        Layout(row("embed.weight", "embed")),
        {"head.weight": "missing"},
    ),
    "another name": (
        Tied,
        ONE,
        Layout(row("embd.weight", "embed"), ignored("head.weight", "its tie")),
        {"embd.weight": "unexpected", "embed.weight": "missing"},
    ),
    "another shape": (
        Tied,
        {"embed": np.ones((5, 11), np.float32)},
        TIED,
        {"embed.weight": "wrong shape"},
    ),
    "another dtype": (
        Tied,
        {"embed": np.ones((11, 5), np.float16)},
        TIED,
        {"embed.weight": "wrong dtype"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name):
    make, arrays, layout, expected = REFUSED[name]
    module = make()
    before = {key: a.clone() for key, a in module.state_dict().items()}
    problems = problems_of(lambda: transfer.export(arrays, layout, into=module))
    assert expected.items() <= problems.items()
    assert all(torch.equal(before[key], a) for key, a in module.state_dict().items())


# --- adapters ---------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
W, BIAS, A, B = (RNG.standard_normal(s).astype(np.float32) for s in ((5, 3), 3, (5, 2), (2, 3)))
PLAIN = {"kernel": W, "bias": BIAS}


class LinenAdapted(nn.Module):
    @nn.compact
    def __call__(self, x):
        a = self.variable("lora", "lora_a", lambda: jnp.zeros((5, 2))).value
        b = self.variable("lora", "lora_b", lambda: jnp.zeros((2, 3))).value
        return nn.Dense(3, name="q")(x) + x @ a @ b


def of_nnx(wrapped: bool):
    rngs = nnx.Rngs(0)
    if wrapped:
        layer = nnx.LoRA(5, 2, 3, base_module=nnx.Linear(5, 3, rngs=rngs), rngs=rngs)
        lora, base = layer, layer.base_module
    else:
        layer = nnx.LoRALinear(5, 3, lora_rank=2, rngs=rngs)
        lora, base = layer.lora, layer
    base.kernel[...], base.bias[...] = W, BIAS
    lora.lora_a[...], lora.lora_b[...] = A, B
    return layer


ADAPTED = {
    "nnx.LoRALinear": (of_nnx(False), LINEAR),
    "nnx.LoRA": (of_nnx(True), LINEAR),
    "beside": ({"q": {**PLAIN, "lora_a": A, "lora_b": B}}, LINEAR.under("", "q")),
    "by the weight's name": (
        {"w": W, "bias": BIAS, "w_lora_a": A, "w_lora_b": B},
        Layout(row("weight", "w", linear), row("bias", "bias")),
    ),
    "as Keras": (
        {"q": {**PLAIN, "lora_kernel_a": A, "lora_kernel_b": B}},
        LINEAR.under("", "q"),
    ),
    "as torch": (
        {"q": {"weight": W.T, "bias": BIAS, "lora_A": A.T, "lora_B": B.T}},
        Layout(row("weight", "q.weight"), row("bias", "q.bias")),
    ),
    "a collection of Linen's": (
        (LinenAdapted(), {"params": {"q": PLAIN}, "lora": {"q": {"lora_a": A, "lora_b": B}}}),
        LINEAR.under("", "q"),
    ),
}


WORDS = {
    "exploration.w": 0,
    "flora.table": 0,
    "q.lora_a": 1,
    "adapters.down": 1,
    "linear_adapter.w": 1,
    "LoRADense_0.a": 1,
    "BottleneckAdapter_0.w": 1,
    "QLoRA_0.a": 1,
}


@pytest.mark.parametrize("name", WORDS)
def test_only_a_word_of_its_path_makes_an_array_an_adapters(name):
    arrays = {**PLAIN, name: np.ones(3)}
    refused = refuse_adapters(nnx.State(arrays), PLAIN)
    assert [p.name for p in refused] == [name] * WORDS[name]


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_merged_or_refused_and_never_dropped(name):
    port, layout = ADAPTED[name]
    refused = problems_of(lambda: transfer.export(port, layout))
    assert {*refused.values()} == {"refused"}
    assert len(refused) == 2
    assert all("lora" in path for path in refused)
    module = torch.nn.Linear(5, 3)
    transfer.export(transfer.merge_lora(port, scale=0.5), layout, into=module)
    exact = W.astype(np.float64) + 0.5 * (A.astype(np.float64) @ B)
    np.testing.assert_array_equal(module.weight.detach().numpy(), exact.T.astype(np.float32))
    np.testing.assert_array_equal(module.bias.detach().numpy(), BIAS)


def test_heads_and_experts_are_merged_by_their_axes():
    q = {"q": {"w": np.zeros((5, 2, 3)), "lora_a": np.ones((5, 7)), "lora_b": np.ones((7, 2, 3))}}
    experts = {"w": np.zeros((4, 5, 3)), "lora_a": np.ones((4, 5, 7)), "lora_b": np.ones((4, 7, 3))}
    with jax.enable_x64(True):
        merged = transfer.flatten(transfer.merge_lora(q | {"up": experts}, scale=2.0))
    assert {path: np.unique(a).tolist() for path, a in merged.items()} == {
        "q.w": [14],
        "up.w": [14],
    }


SQUARE, DOWN, UP = (RNG.standard_normal(s) for s in ((5, 5), (5, 2), (2, 5)))
ORDERED = {
    "a kernel": ("kernel", DOWN, UP, DOWN @ UP),
    "a kernel, factors as torch's": ("kernel", DOWN.T, UP.T, DOWN @ UP),
    "a weight": ("weight", DOWN, UP, (DOWN @ UP).T),
    "a weight, factors as torch's": ("weight", DOWN.T, UP.T, (DOWN @ UP).T),
    "its own name ends so": ("q_kernel", DOWN.T, UP.T, DOWN @ UP),
    "nothing added yet": ("w", DOWN, 0 * UP, 0 * SQUARE),
}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("experts", [(), (3,)], ids=["one", "stacked"])
def test_a_square_weight_gets_its_product_in_the_order_of_its_name(name, experts):
    leaf, a, b, product = ORDERED[name]
    arrays = {leaf: SQUARE, "lora_a": a, "lora_b": b}
    port = {"q": {key: np.broadcast_to(x, experts + x.shape) for key, x in arrays.items()}}
    with jax.enable_x64(True):
        merged = transfer.flatten(transfer.merge_lora(port, scale=0.5))
    (got,) = merged.values()
    exact = np.broadcast_to(SQUARE + 0.5 * product, got.shape)
    np.testing.assert_allclose(got, exact, rtol=0, atol=4 * np.finfo(np.float64).eps * 5)


UNMERGED = {
    "a square weight whose name tells no order": (
        {"q": {"w": SQUARE, "lora_a": DOWN, "lora_b": UP}},
        {"q.lora_a": "ambiguous"},
    ),
    "no adapter": ({"q": PLAIN}, {"module": "missing"}),
    "half of one": ({"q": {**PLAIN, "lora_a": A}}, {"q.lora_b": "missing"}),
    "no weight that fits": (
        {"q": {"kernel": W[:4], "lora_a": A, "lora_b": B}},
        {"q.lora_a": "missing"},
    ),
    "either order fits": (
        {"q": {"kernel": W[:3], "lora_a": W[:3], "lora_b": W[1:4]}},
        {"q.lora_a": "ambiguous"},
    ),
}


@pytest.mark.parametrize("name", UNMERGED)
def test_what_cannot_be_merged_is_refused_by_name(name):
    port, expected = UNMERGED[name]
    assert problems_of(lambda: transfer.merge_lora(port, scale=1.0)) == expected
