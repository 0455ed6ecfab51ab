"""One torch design is another: packed, head by head, grouped; and what their masks hide."""

import math

import pytest
import torch
from torch import nn

from helpers.torch_designs import EXTRA_ARGS, B, D, H, N, T, built, seeded

U = 2.0**-53


def grouped_twin(module: nn.Module, num_kv_heads: int) -> nn.Module:
    """`gqa` with the weights of a W_Q … W_O design."""
    twin = built("gqa", D, N, num_kv_heads)
    for ours, theirs in zip(
        ("q_proj", "k_proj", "v_proj", "out_proj"), ("W_Q", "W_K", "W_V", "W_O"), strict=True
    ):
        getattr(twin, ours).load_state_dict(getattr(module, theirs).state_dict())
    return twin


def rounding_bound(x_BTD: torch.Tensor, gqa: nn.Module, mask=None) -> torch.Tensor:
    """How far two float64 evaluations of one self-attention may lie apart, element by element.

    An inner product of length n, in whatever order, errs by at most n·u of the same product
    taken over absolute values (Higham, §3.1; u², and the constants that count single
    operations, are covered by the +2, +8). A logit that errs by e turns its probability by
    at most 2·max(e), relatively. Two evaluations: twice that.
    """
    K, scale = gqa.num_kv_heads, gqa.scale

    def magnitude(linear: nn.Linear, a: torch.Tensor) -> torch.Tensor:
        return a.abs() @ linear.weight.abs().T + linear.bias.abs()

    q_BTKGH = magnitude(gqa.q_proj, x_BTD).unflatten(-1, (K, -1, H))
    k_BSKH = magnitude(gqa.k_proj, x_BTD).unflatten(-1, (K, H))
    v_BSKH = magnitude(gqa.v_proj, x_BTD).unflatten(-1, (K, H))
    logits = scale * torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH)
    logit_error = (2 * (D + 2) + H + 8) * U * logits.amax(-1, keepdim=True)
    weights = gqa.attention_weights(x_BTD, mask=mask).unflatten(1, (K, -1))
    relative = 2 * logit_error + (2 * T + D + 8) * U
    heads = torch.einsum("bkgts,bskh->btkgh", weights, v_BSKH).flatten(2)
    heads_error = torch.einsum("bkgts,bskh->btkgh", weights * relative, v_BSKH).flatten(2)
    out_error = heads_error @ gqa.out_proj.weight.abs().T
    return 2 * (out_error + (D + 2) * U * magnitude(gqa.out_proj, heads)).detach()


# ------------------------------------------------------------- one design is another


def head_by_head(x_BTD: torch.Tensor, packed: nn.Module) -> torch.Tensor:
    """headᵢ = softmax(XWᵢ^Q (XWᵢ^K)ᵀ / √H) XWᵢ^V; Concat(head₁ … head_N) Wᴼ, as published."""
    weight, bias = packed.qkv_proj.weight, packed.qkv_proj.bias
    heads = []
    for i in range(N):
        q, k, v = (
            x_BTD @ weight[which * D + i * H : which * D + (i + 1) * H].T
            + bias[which * D + i * H : which * D + (i + 1) * H]
            for which in range(3)
        )
        heads.append(torch.softmax(q @ k.mT / math.sqrt(H), dim=-1) @ v)
    return torch.cat(heads, dim=-1) @ packed.out_proj.weight.T + packed.out_proj.bias


def unpacked(packed: nn.Module) -> nn.Module:
    twin = built("gqa", D, N, N)
    names = ("q_proj", "k_proj", "v_proj")
    for name, weight, bias in zip(
        names, packed.qkv_proj.weight.chunk(3), packed.qkv_proj.bias.chunk(3), strict=True
    ):
        getattr(twin, name).load_state_dict({"weight": weight, "bias": bias})
    twin.out_proj.load_state_dict(packed.out_proj.state_dict())
    return twin


def exceeds(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> bool:
    return bool(((got - want).abs() > bound).any())


def test_packed_form_is_the_head_by_head_form():
    x, packed = seeded(B, T, D), built("fused_mha", D, N)
    bound = rounding_bound(x, unpacked(packed))
    assert not exceeds(packed(x), head_by_head(x, packed), bound)


def test_packed_form_in_the_order_query_value_key_is_seen():
    x, packed = seeded(B, T, D), built("fused_mha", D, N)
    bound, want = rounding_bound(x, unpacked(packed)), head_by_head(x, packed)
    for parameter in packed.qkv_proj.parameters():
        parameter.data = parameter.data.unflatten(0, (3, D))[[0, 2, 1]].flatten(0, 1)
    assert exceeds(packed(x), want, bound)


MASKS = {
    "no mask": None,
    "causal": torch.ones(T, T).tril(),
    "padding": (torch.arange(T) < torch.tensor([[T], [3]]))[:, None, None].float(),
    "per head": (seeded(B, N, T, T, seed=7) > 0).float().index_fill(-1, torch.tensor([0]), 1.0),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("name", "num_kv_heads"), [("masked_mha", N), ("mqa", 1)])
def test_gqa_generalises(name, num_kv_heads, mask):
    x, module = seeded(B, T, D), built(name, D, N)
    twin = grouped_twin(module, num_kv_heads)
    allowed = None if mask is None else mask == 1
    bound = rounding_bound(x, twin, allowed)
    assert not exceeds(twin(x, mask=allowed), module(x, mask), bound)


@pytest.mark.parametrize(
    "planted",
    [
        lambda twin: setattr(twin, "scale", twin.scale * (1 + 1e-9)),
        lambda twin: twin.k_proj.weight.data.mul_(1 + 1e-9),
        lambda twin: twin.v_proj.weight.data.mul_(1 + 1e-9),
    ],
    ids=["scale", "key weight", "value weight"],
)
def test_the_bound_sees_an_error_of_1e_9(planted):
    x, module = seeded(B, T, D), built("masked_mha", D, N)
    twin = grouped_twin(module, N)
    causal = torch.ones(T, T).tril()
    bound = rounding_bound(x, twin, causal == 1)
    want = module(x, causal)
    planted(twin)
    assert exceeds(twin(x, mask=causal == 1), want, bound)


def test_query_heads_of_a_group_stand_together():
    """Head n reads key/value head n // G (repeated), never n % K (tiled)."""
    x, grouped = seeded(B, T, D), built("gqa", D, 4, 2, head_dim=H)
    repeated, tiled = built("gqa", D, 4, 4, head_dim=H), built("gqa", D, 4, 4, head_dim=H)
    for full, heads in ((repeated, [0, 0, 1, 1]), (tiled, [0, 1, 0, 1])):
        state = grouped.state_dict()
        for key in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
            state[key] = state[key].unflatten(0, (2, H))[heads].flatten(0, 1)
        full.load_state_dict(state)
    bound = rounding_bound(x, grouped)
    assert not exceeds(grouped(x), repeated(x), bound)
    assert exceeds(grouped(x), tiled(x), bound)


def test_gqa_order_scale_softcap_bias_mask():
    x, module = seeded(B, T, D), built("gqa", D, N, N, scale=0.3, softcap=1.7)
    bias, mask = seeded(N, T, T, seed=5), torch.ones(T, T, dtype=torch.bool).tril()
    q, k = (p(x).unflatten(-1, (N, H)).transpose(1, 2) for p in (module.q_proj, module.k_proj))
    logits = 1.7 * torch.tanh(0.3 * q @ k.mT / 1.7) + bias
    want = torch.softmax(logits.masked_fill(~mask, -math.inf), dim=-1)
    got = module.attention_weights(x, bias=bias, is_causal=True)
    # tanh lies within ±1: 1.7 + |bias| bounds every logit, 1 its slope; counts as above.
    logit_error = 4 * (2 * (D + 2) + H + 8) * U * (0.3 * (q.abs() @ k.abs().mT) + 1.7 + bias.abs())
    bound = want * (2 * logit_error.amax(-1, keepdim=True) + (2 * T + 8) * U)
    assert not exceeds(got, want, bound)
    assert exceeds(module.attention_weights(x, is_causal=True), want, bound)
    assert exceeds(module.attention_weights(x, bias=bias), want, bound)


# ----------------------------------------------------------------------- masks


def causal_output(name: str, x: torch.Tensor) -> torch.Tensor:
    module, tril = built(name, D, N, *EXTRA_ARGS.get(name, ())), torch.ones(T, T).tril()
    if name == "gqa":
        return module(x, is_causal=True)
    return module(x, tril.expand(B, T, T))[0] if name == "weights_mha" else module(x, tril)


@pytest.mark.parametrize("name", ["weights_mha", "masked_mha", "mqa", "gqa"])
def test_the_future_does_not_reach_the_past(name):
    x = seeded(B, T, D)
    changed = torch.cat([x[:, :3], seeded(B, T - 3, D, seed=9)], dim=1)
    before, after = causal_output(name, x), causal_output(name, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).all()


def empty_row_mask() -> torch.Tensor:
    """Query 3 of batch 1 may attend to nothing."""
    mask = torch.ones(B, T, T)
    mask[1, 3] = 0
    return mask


@pytest.mark.parametrize("name", ["weights_mha", "masked_mha", "mqa"])
def test_a_fully_masked_row_is_nan_as_published(name):
    mask = empty_row_mask()
    module = built(name, D, N)
    output = module(seeded(B, T, D), mask if name == "weights_mha" else mask[:, None])
    if name == "weights_mha":
        output, weights = output
        assert torch.equal(
            weights.isnan(), (mask.sum(-1) == 0)[:, None, :, None].expand_as(weights)
        )
    assert torch.equal(output.isnan(), (mask.sum(-1) == 0)[..., None].expand_as(output))


@pytest.mark.parametrize("how", ["mask", "bias"])
def test_a_fully_masked_row_of_gqa_is_zero_and_sends_no_gradient(how):
    x = seeded(B, T, D).requires_grad_()
    module = built("gqa", D, N, 1)
    allowed = empty_row_mask()[:, None] == 1
    additive = torch.zeros(B, 1, T, T, dtype=torch.float64).masked_fill(~allowed, -math.inf)
    keywords = {"mask": allowed} if how == "mask" else {"bias": additive}
    weights = module.attention_weights(x, **keywords)
    assert (weights[1, :, 3] == 0).all()
    assert not weights.isnan().any()
    output = module(x, **keywords)
    assert torch.equal(output[1, 3], module.out_proj.bias)
    output[1, 3].sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert all(g.isfinite().all() for g in gradients.values())
    assert (gradients["out_proj.bias"] == 1).all()
    assert all((g == 0).all() for name, g in gradients.items() if name != "out_proj.bias")
