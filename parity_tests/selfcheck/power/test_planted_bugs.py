"""Port bugs as people write them, each planted in a real port: its case must turn to FAIL.

The same row is run without the bug first, and passes: it is the bug that fails, not the row. All
eagerly, where nothing but a design's first row is compiled.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from jax_attn.attention import Mask
from jax_attn.attention.kernels import cached, dense, page_writers, partial_softmax
from jax_attn.nn import arguments
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import Verdict
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS
from jax_attn.selfcheck.matrix.preparation import Preparation
from jax_attn.selfcheck.matrix.run_rows import judge_case
from jax_attn.transfer import FROM_HEADS, TO_HEADS, Layout, heads, linear, packed, row


def four(names: dict[str, str]) -> Layout:
    """masked_mha's table with its torch names dealt out to the Flax ones as given."""
    ends = [TO_HEADS.under(names[p], f"{p}_proj") for p in "qkv"]
    return Layout(*ends, FROM_HEADS.under("W_O", "out_proj"))


def with_layout(layout: Layout):
    return lambda design: replace(design, layout=layout)


def with_call(wrap):
    """Replace how the port is called: wrap(call) -> call."""

    def changed(design):
        return replace(design, port_call=lambda kind: wrap(design.port_call(kind)))

    return changed


def scaled(call):
    def wrong(module, **inputs):
        module.scale = 1.01 * module.head_dim**-0.5
        return call(module, **inputs)

    return wrong


def inverted(call):
    return lambda module, allowed, **inputs: call(module, allowed=~allowed, **inputs)


def causal_plus_one(call):
    return lambda module, x: {"output": module(x, mask=Mask.causal(1))}


def without_bias(call):
    def wrong(module, **inputs):
        module.v_proj.bias[...] = jnp.zeros_like(module.v_proj.bias[...])
        return call(module, **inputs)

    return wrong


def tiled(call):
    """Query head n reads key/value head n % K, as after a tile, not n // G as after a repeat."""

    def wrong(module, **inputs):
        N, K = module.num_heads, module.num_kv_heads
        order = jnp.arange(N).reshape(K, N // K).T.reshape(-1)
        back = jnp.argsort(order)
        for name in ("kernel", "bias"):
            q = getattr(module.q_proj, name)
            q[...] = jnp.take(q[...], back, axis=-2)
        module.out_proj.kernel[...] = jnp.take(module.out_proj.kernel[...], back, axis=0)
        return call(module, **inputs)

    return wrong


def learned_swapped(call):
    def wrong(module, **inputs):
        module.bias_k, module.bias_v = module.bias_v, module.bias_k
        return call(module, **inputs)

    return wrong


def no_zero_key(call):
    def wrong(module, **inputs):
        module.add_zero_attn = False
        return call(module, **inputs)

    return wrong


def sinks_scaled(call):
    def wrong(module, **inputs):
        module.sinks[...] = module.sinks[...] * module.head_dim**-0.5
        return call(module, **inputs)

    return wrong


def stopped(call):
    def wrong(module, query, key, value, **inputs):
        return call(module, query=query, key=jax.lax.stop_gradient(key), value=value, **inputs)

    return wrong


def bfloat16_softmax(monkeypatch):
    right = jax.nn.softmax

    def wrong(x, *args, **kwargs):
        return right(x.astype(jnp.bfloat16), *args, **kwargs).astype(x.dtype)

    monkeypatch.setattr(dense.jax.nn, "softmax", wrong)


SQUARE_UNTRANSPOSED = Layout(
    row("W_Q.weight", "q_proj.kernel", heads),
    row("W_Q.bias", "q_proj.bias", heads),
    TO_HEADS.under("W_K", "k_proj"),
    TO_HEADS.under("W_V", "v_proj"),
    FROM_HEADS.under("W_O", "out_proj"),
)
KERNELS_QVK = ("q_proj.kernel", "v_proj.kernel", "k_proj.kernel")
BIASES_QVK = ("q_proj.bias", "v_proj.bias", "k_proj.bias")
PACKED_QVK = Layout(
    row("in_proj_weight", KERNELS_QVK, packed, linear, heads),
    row("in_proj_bias", BIASES_QVK, packed, heads),
    FROM_HEADS.under("out_proj", "out_proj"),
)
FUSED_QVK = Layout(
    row("qkv_proj.weight", KERNELS_QVK, packed, linear, heads),
    row("qkv_proj.bias", BIASES_QVK, packed, heads),
    FROM_HEADS.under("out_proj", "out_proj"),
)

# bug -> (design, mask, how it is planted)
BUGS = {
    "square kernel untransposed": ("masked_mha", "none", with_layout(SQUARE_UNTRANSPOSED)),
    "key and value swapped": (
        "masked_mha",
        "none",
        with_layout(four({"q": "W_Q", "k": "W_V", "v": "W_K"})),
    ),
    "query and key swapped under a mask": (
        "masked_mha",
        "causal",
        with_layout(four({"q": "W_K", "k": "W_Q", "v": "W_V"})),
    ),
    "packed order q-v-k": ("torch_mha", "none", with_layout(PACKED_QVK)),
    "fused order q-v-k": ("fused_mha", "none", with_layout(FUSED_QVK)),
    "scale off by 1%": ("weights_mha", "none", with_call(scaled)),
    "mask polarity": ("gqa", "per_head", with_call(inverted)),
    "causal off by one": ("masked_mha", "causal", with_call(causal_plus_one)),
    "heads tiled instead of repeated": ("gqa", "none", with_call(tiled)),
    "value bias dropped": ("torch_mha", "padding", with_call(without_bias)),
    "gradient stopped at the keys": ("gqa", "window", with_call(stopped)),
    "learned key and value swapped": ("torch_mha/extra_keys", "none", with_call(learned_swapped)),
    "zero key left out": ("torch_mha/extra_keys", "none", with_call(no_zero_key)),
    "sinks scaled": ("gqa/sinks", "window", with_call(sinks_scaled)),
}


@cache
def right(design: str, mask: str) -> Preparation:
    """A row without any bug, which passes."""
    row = Preparation(PORTED_DESIGNS[design], Case(design, "float32", mask, "prime", "eager"))
    assert judge_case(row, row.case, ()).verdict is Verdict.PASS
    return row


def verdict(design: str, mask: str, plant=lambda design: design) -> Verdict:
    """Of the row with the bug, its port built anew and judged beside the same reference."""
    prepared = right(design, mask).prepared
    wrong = Preparation(plant(PORTED_DESIGNS[design]), right(design, mask).case)
    to_torch, failures = wrong.design.layout.to_torch, wrong.weight_failures
    return judge_port(
        prepared, wrong.port, ("eager",), to_torch=to_torch, failures=failures
    ).verdict


# Each a kind of bug that another one of this file is of, too.
REPEATED = ("fused order q-v-k", "key and value swapped", "zero key left out")
REPEATED_OF_CACHE = ("a stale tail", "a ragged ring that does not wrap", "a ring one too long")


def pytest_generate_tests(metafunc):
    """A bug of each kind; all with --long."""
    long = metafunc.config.getoption("--long")
    for name, bugs, left_out in (
        ("bug", BUGS, REPEATED),
        ("bug_of_cache", CACHE_BUGS, REPEATED_OF_CACHE),
    ):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [bug for bug in bugs if long or bug not in left_out])


@pytest.mark.slow
def test_a_planted_bug_turns_its_case_to_fail(bug):
    assert verdict(*BUGS[bug]) is Verdict.FAIL


@pytest.mark.slow
def test_a_softmax_in_bfloat16_turns_its_case_to_fail(monkeypatch):
    assert right("plain_mha", "none")
    bfloat16_softmax(monkeypatch)
    assert verdict("plain_mha", "none") is Verdict.FAIL


@pytest.mark.slow
def test_a_bias_added_with_the_wrong_sign_turns_its_case_to_fail():
    def negated(call):
        return lambda module, bias, **inputs: call(module, bias=-bias, **inputs)

    assert verdict("gqa", "bias", with_call(negated)) is Verdict.FAIL


@pytest.mark.slow
def test_a_row_that_may_attend_to_nothing_given_the_mean_of_the_values_fails():
    """What jax.nn and flax do there; ours, and the definition, give 0."""

    def mean_of_values(call):
        def wrong(module, x, allowed):
            empty = ~allowed.any(axis=-1, keepdims=True)
            return call(module, x=x, allowed=allowed | empty)

        return wrong

    assert verdict("masked_mha", "empty_row", with_call(mean_of_values)) is Verdict.FAIL


# --- the cache: judged by the outputs alone, compiled ---------------------------------------------


def another_order(grown):
    """Values are cached in another order than their keys."""
    return lambda cache, call, axes: grown(cache, replace(call, value=call.value[:, ::-1]), axes)


def all_rows_alike(grown):
    """Every row is taken to have read as many tokens as the chunk is long."""

    def wrong(cache, call, axes):
        return grown(cache, replace(call, mask=replace(call.mask, kv_lengths=None)), axes)

    return wrong


def one_place_late(corner):
    return lambda x, b, at, axis: corner(x, b, at + 1, axis)


def filled_one_more(tokens, by=1):
    """The place behind the last token counts as one more; by = -1: the last does not."""
    return lambda cache, places: tokens(replace(cache, filled=cache.filled + by), places)


def no_wrap(tokens):
    """What lies in a ring is taken for the first tokens."""
    return lambda cache, places: tokens(replace(cache, window=None), places)


def one_too_long(lowest):
    return lambda mask, cache: lowest(mask, cache) - 1


def every_piece_from_0(turned):
    """Each piece's positions start anew."""

    def wrong(query, key, placement, rotary):
        return turned(query, key, placement._replace(positions=None, key_positions=None), rotary)

    return wrong


def no_sinks(of_extra_keys):
    return lambda call: of_extra_keys(replace(call, sinks=None))


# bug -> (the row that is to see it, what it replaces, by what)
CACHE_BUGS = {
    "cache order": ("gqa/cached", "causal", cached, "_grown", another_order),
    "written one place late": ("gqa/cached", "causal", page_writers, "_corner", one_place_late),
    "a stale tail": ("gqa/cached", "causal", cached, "_tokens", filled_one_more),
    "the last token forgotten": (
        "gqa/cached",
        "causal",
        cached,
        "_tokens",
        partial(filled_one_more, by=-1),
    ),
    "a ring that does not wrap": ("gqa/cached", "sliding", cached, "_tokens", no_wrap),
    "a ring one too long": ("gqa/cached", "sliding", cached, "_lowest", one_too_long),
    "a wrong offset": ("gqa/cached_rotary", "causal", arguments, "turned", every_piece_from_0),
    "sinks left out": (
        "gqa/cached_extra_keys",
        "causal",
        partial_softmax,
        "of_extra_keys",
        no_sinks,
    ),
    "all rows filled alike": ("gqa/cached_ragged", "causal", cached, "_grown", all_rows_alike),
    "a ragged ring that does not wrap": (
        "gqa/cached_ragged",
        "sliding",
        cached,
        "_tokens",
        no_wrap,
    ),
}


def test_every_bug_of_the_cache_has_a_place():
    """Told by the fast tests too: who moves a function looks here."""
    missing = [
        bug for bug, (_, _, owner, name, _) in CACHE_BUGS.items() if not hasattr(owner, name)
    ]
    assert not missing


def outputs_verdict(row: Preparation, outputs: Prepared) -> Verdict:
    return judge_port(outputs, row.port, ("jit",), to_torch=None).verdict


@cache
def right_cached(design: str, mask: str) -> tuple[Preparation, Prepared]:
    """A row without any bug, which passes, and its reference's side without gradients."""
    row = Preparation(PORTED_DESIGNS[design], Case(design, "float32", mask, "square", "jit"))
    outputs = replace(row.prepared, gradients=False)
    assert outputs_verdict(row, outputs) is Verdict.PASS
    return row, outputs


@pytest.mark.slow
def test_a_planted_bug_of_the_cache_turns_its_case_to_fail(bug_of_cache, monkeypatch):
    design, mask, owner, name, wrong = CACHE_BUGS[bug_of_cache]
    row, outputs = right_cached(design, mask)
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    # Traced anew: what is compiled has no bug.
    monkeypatch.setattr(cached, "attention", cached.attention.__wrapped__)
    assert outputs_verdict(row, outputs) is Verdict.FAIL
