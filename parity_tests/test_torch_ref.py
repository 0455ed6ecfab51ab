"""The torch designs: what they take, what they give back, and where they left the publication."""

import inspect
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from torch_ref import DESIGNS, plain_mha, torch_mha
from torch_ref.rotary import Rotary

# Prime or at least distinct sizes: no two axes can be taken for one another.
B, T, S, N, H, KDIM, VDIM = 2, 5, 7, 3, 4, 11, 13
D = N * H
U = 2.0**-53


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(name: str, *args, seed: int = 1, **kwargs) -> nn.Module:
    """The design in float64, every parameter (biases too) of order one half."""
    module = DESIGNS[name](*args, **kwargs).double().eval()
    for i, parameter in enumerate(module.parameters()):
        parameter.data = seeded(*parameter.shape, seed=100 * seed + i) / 2
    return module


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


# ----------------------------------------------------------------- names and shapes

LINEAR = ("weight", "bias")
STATE_KEYS = {
    "weights_mha": {f"{m}.{p}" for m in ("w_q", "w_k", "w_v", "w_o") for p in LINEAR},
    "fused_mha": {f"{m}.{p}" for m in ("qkv_proj", "out_proj") for p in LINEAR},
    "masked_mha": {f"{m}.{p}" for m in ("W_Q", "W_K", "W_V", "W_O") for p in LINEAR},
    "mqa": {f"{m}.{p}" for m in ("W_Q", "W_K", "W_V", "W_O") for p in LINEAR},
    "plain_mha": {f"{m}.{p}" for m in ("query", "key", "value", "out") for p in LINEAR},
    "torch_mha": {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"},
    "gqa": {f"{m}_proj.{p}" for m in ("q", "k", "v", "out") for p in LINEAR},
}
EXTRA_ARGS = {"gqa": (N,)}
CONSTRUCTOR_WORDS = {
    "weights_mha": ["d_model", "num_heads", "dropout"],
    "fused_mha": ["embed_dim", "num_heads"],
    "masked_mha": ["d_model", "num_heads"],
    "mqa": ["d_model", "num_heads"],
    "plain_mha": ["embed_dim", "num_heads"],
    "gqa": [
        *("embed_dim", "num_heads", "num_kv_heads", "head_dim", "kdim", "vdim", "bias"),
        *("out_bias", "dropout", "out_dropout", "scale", "softcap", "qk_norm", "rotary"),
    ],
}


def test_every_design_has_a_row_here():
    assert set(STATE_KEYS) == set(DESIGNS)


@pytest.mark.parametrize("name", DESIGNS)
def test_state_dict_keys_are_the_published_ones(name):
    assert set(built(name, D, N, *EXTRA_ARGS.get(name, ())).state_dict()) == STATE_KEYS[name]


@pytest.mark.parametrize("name", CONSTRUCTOR_WORDS)
def test_constructor_words_are_the_published_ones(name):
    assert list(inspect.signature(DESIGNS[name]).parameters) == CONSTRUCTOR_WORDS[name]


@pytest.mark.parametrize("name", ["fused_mha", "masked_mha", "mqa", "plain_mha", "gqa"])
def test_self_attention_keeps_the_shape(name):
    assert built(name, D, N, *EXTRA_ARGS.get(name, ()))(seeded(B, T, D)).shape == (B, T, D)


def test_weights_mha_returns_output_and_weights():
    output, weights = built("weights_mha", D, N)(seeded(B, T, D))
    assert output.shape == (B, T, D)
    assert weights.shape == (B, N, T, T)


def test_mqa_projects_keys_and_values_to_one_head():
    module = DESIGNS["mqa"](D, N)
    assert module.W_K.weight.shape == module.W_V.weight.shape == (H, D)


def test_gqa_cross_attention_with_widths_of_its_own():
    module = built("gqa", D, 6, 2, head_dim=H + 1, kdim=KDIM, vdim=VDIM, out_bias=False)
    query, key, value = seeded(B, T, D), seeded(B, S, KDIM, seed=2), seeded(B, S, VDIM, seed=3)
    assert module(query, key, value).shape == (B, T, D)
    assert module.attention_weights(query, key).shape == (B, 6, T, S)
    assert module.k_proj.weight.shape == (2 * (H + 1), KDIM)
    assert module.v_proj.weight.shape == (2 * (H + 1), VDIM)
    assert module.out_proj.bias is None
    assert module.q_proj.bias is not None


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


# ------------------------------------------------------------------- departures


def test_weights_mha_attention_has_its_self():
    module = built("weights_mha", D, N)

    class AsPublished(type(module)):
        def scaled_dot_product_attention(q, k, v, mask=None):
            raise AssertionError("never reached")

    with pytest.raises(TypeError, match="positional argument"):
        AsPublished(D, N)(torch.zeros(B, T, D))
    module(seeded(B, T, D))


def test_weights_mha_heeds_its_mask_in_every_head():
    mask = (seeded(B, T, T, seed=4) > 0).long()
    mask[..., 0] = 1
    _, weights = built("weights_mha", D, N)(seeded(B, T, D), mask)
    assert torch.equal(weights == 0, (mask == 0)[:, None].expand_as(weights))


def test_weights_mha_mask_of_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"mask: expected shape \(2, 5, 5\), got \(5, 5\)"):
        built("weights_mha", D, N)(seeded(B, T, D), torch.ones(T, T))


def test_weights_mha_drops_from_the_output_only():
    module = built("weights_mha", D, N, dropout=1.0).train()
    output, weights = module(seeded(B, T, D))
    assert (output == 0).all()
    assert torch.equal(weights, module.eval()(seeded(B, T, D))[1])


def test_gqa_drops_weights_and_output_apart():
    x = seeded(B, T, D)
    module = built("gqa", D, N, 1, dropout=1.0).train()
    assert torch.equal(module(x), module.out_proj.bias.expand(B, T, D))
    assert torch.equal(module.attention_weights(x), module.eval().attention_weights(x))
    assert (built("gqa", D, N, 1, out_dropout=1.0).train()(x) == 0).all()


def test_mqa_has_what_it_reads():
    module = built("mqa", D, N)
    with pytest.raises(AttributeError, match="n_model"):
        _ = module.n_model
    with pytest.raises(AttributeError, match="view"):
        _ = seeded(B, T, D).contiguous.view
    assert module(seeded(B, T, D)).shape == (B, T, module.d_model)


def test_nothing_is_printed(capsys):
    for name in sorted(DESIGNS.keys() - {"torch_mha"}):
        built(name, D, N, *EXTRA_ARGS.get(name, ()))(seeded(B, T, D))
    assert capsys.readouterr().out == ""


REFUSALS = {
    "width not divided": (lambda cls: cls(D + 1, N), r"(d_model|embed_dim): .*num_heads=3, got 13"),
    "no heads": (lambda cls: cls(D, 0), "num_heads: expected an int of at least 1, got 0"),
    "negative heads": (lambda cls: cls(D, -3), "num_heads: .* got -3"),
    "true heads": (lambda cls: cls(D, True), "num_heads: .* got True"),
    "half heads": (lambda cls: cls(D, 1.5), r"num_heads: .* got 1\.5"),
}


@pytest.mark.parametrize(("build", "message"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("name", sorted(DESIGNS.keys() - {"torch_mha", "gqa"}))
def test_sizes_that_do_not_fit_are_refused_by_name(name, build, message):
    with pytest.raises(ValueError, match=message):
        build(DESIGNS[name])


GQA_REFUSALS = {
    "kv heads": (lambda: built("gqa", D, 3, 2), "num_heads: .* num_kv_heads=2, got 3"),
    "head_dim": (lambda: built("gqa", D, 3, 3, head_dim=0), "head_dim: "),
    "kdim": (lambda: built("gqa", D, 3, 3, kdim=-1), "kdim: "),
    "dropout": (lambda: built("gqa", D, 3, 3, dropout=1.5), r"dropout: .*\[0, 1\], got 1.5"),
    "softcap": (lambda: built("gqa", D, 3, 3, softcap=0.0), "softcap: "),
    "query": (lambda: built("gqa", D, 3, 3)(seeded(T, D)), "query: "),
    "no key": (lambda: built("gqa", D, 3, 3)(seeded(B, T, D), seeded(B, 0, D)), "key: "),
    "value": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), seeded(B, S, D), seeded(B, T, D)),
        r"value: expected \(2, 7, 12\), length above 0, got \(2, 5, 12\)",
    ),
    "float mask": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), mask=torch.ones(T, T)),
        "mask: expected a boolean",
    ),
    "rank 3": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), mask=torch.ones(B, T, T) > 0),
        r"rank 3 could mean \(B, T, S\) or \(N, T, S\)",
    ),
    "mask shape": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), mask=torch.ones(T, S) > 0),
        r"mask: .*\(2, 3, 5, 5\), got \(5, 7\)",
    ),
    "boolean bias": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), bias=torch.ones(T, T) > 0),
        "bias: expected a floating",
    ),
    "positions without rotary": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), positions=torch.arange(T)),
        "positions: expected None",
    ),
    "key positions without a key": (
        lambda: turning(seeded(B, T, D), key_positions=torch.arange(T)),
        "key_positions: expected None",
    ),
    "positions alone, with a key": (
        lambda: turning(seeded(B, T, D), seeded(B, S, D), positions=torch.arange(T)),
        "positions: expected positions and key_positions",
    ),
    "positions of another length": (
        lambda: turning(seeded(B, T, D), positions=torch.arange(S)),
        r"positions: expected \(5,\) or \(2, 5\), got \(7,\)",
    ),
    "more to turn than there is": (
        lambda: built("gqa", D, 3, 3, rotary=Rotary(dim=6)),
        "rotary: expected an even dim of 2 to head_dim=4, got 6",
    ),
}


def turning(*inputs, **positions):
    return built("gqa", D, 3, 3, rotary=Rotary())(*inputs, **positions)


@pytest.mark.parametrize(("call", "message"), GQA_REFUSALS.values(), ids=GQA_REFUSALS)
def test_gqa_refuses_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------------------ torch's own, the pipeline


def test_torch_mha_is_torchs_own():
    assert DESIGNS["torch_mha"] is nn.MultiheadAttention


@pytest.mark.parametrize(
    ("keywords", "names"),
    [
        ({}, []),
        ({"kdim": KDIM, "vdim": VDIM, "bias": False}, []),
        ({"add_bias_kv": True}, ["bias_k", "bias_v"]),
        ({"add_zero_attn": True}, ["add_zero_attn"]),
        ({"add_bias_kv": True, "add_zero_attn": True}, ["bias_k", "bias_v", "add_zero_attn"]),
    ],
)
def test_torch_mha_refusals_go_by_name(keywords, names):
    module = nn.MultiheadAttention(D, N, **keywords)
    assert torch_mha.refused(module) == names
    if not names:
        torch_mha.refuse(module)
        return
    with pytest.raises(ValueError, match=", ".join(names)):
        torch_mha.refuse(module)


SENTENCES = {
    "published": ("this is an example sentence", [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]),
    "capitals, a stranger": ("This was an  Example", [1, 0, 3, 4, 0, 0, 0, 0, 0, 0]),
    "too long": ("is " * 11, [2] * 10),
    "nothing": ("", [0] * 10),
}


@pytest.mark.parametrize(("sentence", "ids"), SENTENCES.values(), ids=SENTENCES)
def test_sentences_become_ids(sentence, ids):
    encoded = plain_mha.encode_sentence(sentence, plain_mha.simple_tokenizer)
    assert encoded.dtype == torch.long
    assert encoded.tolist() == ids


def test_sentence_attention_embeds_then_attends():
    pipeline = plain_mha.SentenceAttention(6, D, N)
    ids = plain_mha.encode_sentence("an example", plain_mha.simple_tokenizer, max_len=T)[None]
    assert torch.equal(pipeline(ids), pipeline.attention(pipeline.embedding(ids)))
    assert {key.split(".")[0] for key in pipeline.state_dict()} == {"embedding", "attention"}


# ------------------------------------------------------------------------- isolation


def modules_of_jax_after(statement: str) -> list[str]:
    report = (
        f"import sys; {statement}; "
        "print(*(m for m in sys.modules if m.split('.')[0] in {'jax', 'jaxlib', 'flax'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_torch_ref_imports_no_jax():
    assert modules_of_jax_after("import torch_ref") == []


def test_the_isolation_test_can_fail():
    assert "jax" in modules_of_jax_after("import torch_ref, jax")
