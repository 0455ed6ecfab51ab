"""The catalogue of planted bugs in attention, and which rows claim to detect them."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from jax_attn.parity.bugs import softmax
from jax_attn.parity.bugs.heads import tiled
from jax_attn.selfcheck.oracle import HeadNorm, Turn
from jax_attn.selfcheck.power import claims, plants
from jax_attn.selfcheck.power.bug import ClaimedBug
from jax_attn.selfcheck.power.claims import FINE, SINGLE
from jax_attn.selfcheck.power.extra_key_bugs import EXTRA_KEY_BUGS
from jax_attn.selfcheck.power.mutable_attention import capped, head_size

_PROBABILITIES = {
    bits: {"softmax": lambda right, p, s, bits=bits: plants.rounded(right(p, s), bits)}
    for bits in (8, 11)
}
_SUMS = {bits: {"product": partial(plants.summed, bits=bits)} for bits in (8, 11)}

_CAUSAL = claims.several_and(claims.any_mask("causal"))
_BAND = claims.several_and(claims.any_mask("window", "sliding"))
_BIASED = claims.several_and(claims.any_mask("bias"))
_FINE_SCORES = claims.several_and(claims.at(FINE))
_PLAIN, _NONE = ("plain_mha", "none"), ("gqa", "none")
_ROTARY = ("gqa/rotary", "causal")
_PIECES = ("gqa/cached", "causal")

BUGS: dict[str, ClaimedBug] = {
    # Masks.
    "mask polarity": ClaimedBug(
        plants.hiding("mask (polarity)"),
        ("gqa", "per_head"),
        lambda c, p, u: p.allowed is not None and c.mask != "padding",
    ),
    "padding polarity": ClaimedBug(
        plants.hiding("mask (polarity)"), ("torch_mha", "padding"), claims.any_mask("padding")
    ),
    "mask ignored": ClaimedBug(
        plants.hiding("mask (ignored)"), ("masked_mha", "per_head"), claims.hides
    ),
    "attention and padding masks or-ed": ClaimedBug(
        plants.hiding("mask (padding or causal)"),
        ("gqa", "causal_padding"),
        lambda c, p, u: c.mask == "causal_padding" and 1 < c.size.T == c.size.S,
    ),
    "mask off by one key": ClaimedBug(
        plants.hiding("mask (one key later)"),
        ("gqa", "window"),
        claims.several_and(claims.any_mask("causal", "window", "sliding")),
    ),
    "causal: the next key too": ClaimedBug(
        plants.hiding("causal (the next key too)"), ("weights_mha", "causal"), _CAUSAL
    ),
    "causal: not the own key": ClaimedBug(
        plants.hiding("causal (not the own key)"),
        ("torch_mha", "causal"),
        claims.any_mask("causal", "sliding"),
    ),
    "causal: the other corner": ClaimedBug(
        plants.hiding("causal (the other corner)"),
        ("gqa", "causal"),
        lambda c, p, u: c.mask == "causal" and c.size.T != c.size.S,
    ),
    "window one key longer": ClaimedBug(
        plants.hiding("window (one key longer)"), ("gqa", "sliding"), _BAND
    ),
    "the past ignored": ClaimedBug(
        plants.masked(plants.own_piece),
        _PIECES,
        claims.several_and(
            claims.cached("cached", "cached_rotary"), claims.any_mask("causal", "sliding")
        ),
    ),
    "-1e4 for -inf": ClaimedBug(
        {"hidden": plants.finite_mask}, ("masked_mha", "empty_row"), claims.sees_nothing
    ),
    "a row that sees nothing: the mean of all": ClaimedBug(
        {"softmax": plants.mean_where_empty}, ("mqa", "empty_row"), claims.sees_nothing
    ),
    # Biases of the scores.
    "bias sign": ClaimedBug(
        plants.changed_problem(lambda p: replace(p, bias=-p.bias)), ("gqa", "bias"), _BIASED
    ),
    "bias ignored": ClaimedBug(
        plants.changed_problem(lambda p: replace(p, bias=None)), ("torch_mha", "bias"), _BIASED
    ),
    "bias before the scale": ClaimedBug(
        plants.changed_problem(lambda p: replace(p, bias=p.bias * head_size(p) ** -0.5)),
        ("torch_mha", "bias"),
        _BIASED,
    ),
    # Weights.
    "query and key swapped": ClaimedBug(
        plants.reads(q="k", k="q"),
        ("torch_mha", "causal"),
        claims.several_and(claims.alike("q", "k")),
    ),
    "key and value swapped": ClaimedBug(plants.reads(k="v", v="k"), _PLAIN, claims.alike("k", "v")),
    "keys for values": ClaimedBug(
        plants.reads(v="k"), ("weights_mha", "none"), claims.alike("k", "v")
    ),
    "packed in another order": ClaimedBug(
        plants.reads(q="k", k="v", v="q"),
        ("fused_mha", "none"),
        lambda c, p, u: c.family in ("fused_mha", "torch_mha") and claims.alike(*"qkv")(c, p, u),
    ),
    "query kernel untransposed": ClaimedBug(
        plants.transposed("q"), ("masked_mha", "none"), claims.several_and(claims.square("q"))
    ),
    "output kernel untransposed": ClaimedBug(
        plants.transposed("o"), ("masked_mha", "none"), claims.square("o")
    ),
    "biases dropped": ClaimedBug(
        {"biased": lambda right, p, name, y: y}, ("torch_mha", "none"), claims.weight("q.bias")
    ),
    "biases doubled": ClaimedBug(
        {"biased": lambda right, p, name, y: right(p, name, right(p, name, y))},
        _NONE,
        claims.weight("q.bias"),
    ),
    "value bias dropped": ClaimedBug(
        {"biased": lambda right, p, name, y: y if name == "v" else right(p, name, y)},
        ("torch_mha", "padding"),
        claims.weight("v.bias"),
    ),
    "output bias dropped": ClaimedBug(
        {"biased": lambda right, p, name, y: y if name == "o" else right(p, name, y)},
        ("mqa", "none"),
        claims.weight("o.bias"),
    ),
    # Heads.
    "heads tiled instead of repeated": ClaimedBug(
        {"shared": lambda right, p, x: tiled(p.num_heads // p.num_kv_heads, right(p, x))},
        _NONE,
        claims.grouped,
    ),
    "key/value heads rolled": ClaimedBug(
        {"shared": lambda right, p, x: right(p, x.roll(1, dims=1))},
        _NONE,
        lambda c, p, u: p.num_kv_heads > 1,
    ),
    "heads in another order than the output's": ClaimedBug(
        {"split": plants.rolled_heads}, _PLAIN, claims.tells_heads
    ),
    "features split into heads the wrong way round": ClaimedBug(
        {"split": lambda right, p, y, n: y.unflatten(-1, (-1, n)).permute(0, 3, 1, 2)},
        _PLAIN,
        lambda c, p, u: claims.tells_heads(c, p, u) and head_size(p) > 1,
    ),
    # Scores.
    "scale 1% too large": ClaimedBug(
        plants.scaled(lambda p, s: 1.01 * s), ("weights_mha", "none"), _FINE_SCORES
    ),
    "scale 1% too small": ClaimedBug(
        plants.scaled(lambda p, s: 0.99 * s), ("fused_mha", "none"), _FINE_SCORES
    ),
    "scale by one feature more": ClaimedBug(
        plants.scaled(lambda p, s: s * (head_size(p) / (head_size(p) + 1)) ** 0.5),
        _PLAIN,
        _FINE_SCORES,
    ),
    "scale by all features": ClaimedBug(
        plants.scaled(lambda p, s: s * p.num_heads**-0.5),
        _PLAIN,
        lambda c, p, u: claims.several(c, p, u) and p.num_heads > 1,
    ),
    "scale twice": ClaimedBug(plants.scaled(lambda p, s: s * s), _PLAIN, claims.several),
    "no scale": ClaimedBug(plants.scaled(lambda p, s: 1.0), _PLAIN, claims.several),
    softmax.OVER_QUERIES.name: ClaimedBug(
        {"softmax": lambda right, p, s: softmax.over_queries(s, -1)},
        _PLAIN,
        lambda c, p, u: c.size.T > 1,
    ),
    "softmax with 1 more below": ClaimedBug({"softmax": plants.plus_one}, _PLAIN, claims.always),
    "softcap ignored": ClaimedBug(
        plants.changed_problem(lambda p: replace(p, softcap=None)),
        ("gqa/softcap", "none"),
        lambda c, p, u: p.softcap is not None and u in FINE,
    ),
    "softcap after the mask": ClaimedBug(
        {"capped": lambda right, p, s: s, "hidden": lambda right, p, s: capped(p, right(p, s))},
        ("gqa/softcap", "causal"),
        lambda c, p, u: p.softcap is not None and claims.hides(c, p, u),
    ),
    # Precision.
    "probabilities in bfloat16": ClaimedBug(
        _PROBABILITIES[8], _PLAIN, claims.several_and(claims.at(SINGLE))
    ),
    "probabilities in float16": ClaimedBug(
        _PROBABILITIES[11], _PLAIN, claims.several_and(claims.at(SINGLE))
    ),
    "sums in bfloat16": ClaimedBug(_SUMS[8], _PLAIN, claims.at(SINGLE)),
    "sums in float16": ClaimedBug(_SUMS[11], _PLAIN, claims.at(SINGLE)),
    "parameters in bfloat16": ClaimedBug(plants.narrow(8), _PLAIN, claims.at(SINGLE)),
    "parameters in float16": ClaimedBug(plants.narrow(11), _PLAIN, claims.at(SINGLE)),
    "products in TF32": ClaimedBug(
        {"product": lambda right, p, a, b: right(p, plants.rounded(a, 11), plants.rounded(b, 11))},
        _PLAIN,
        claims.at(SINGLE),
    ),
    # Positions and norms.
    "rotary pairs of the other convention": ClaimedBug(
        plants.each(Turn, lambda turn: replace(turn, interleaved=not turn.interleaved)),
        ("gqa/rotary_interleaved_partial", "padding"),
        claims.several_and(claims.steps(Turn)),
    ),
    "rotary base doubled": ClaimedBug(
        plants.each(Turn, lambda turn: replace(turn, base=2 * turn.base)),
        _ROTARY,
        claims.several_and(claims.steps(Turn), claims.at(FINE)),
    ),
    "queries a position too far": ClaimedBug(
        plants.each(Turn, lambda turn: replace(turn, first=turn.first + 1)),
        ("gqa/cached_rotary", "causal"),
        claims.several_and(claims.steps(Turn)),
    ),
    "the other norm": ClaimedBug(
        plants.each(HeadNorm, lambda norm: replace(norm, centred=not norm.centred)),
        ("gqa/qk_layer_norm", "causal"),
        claims.several_and(claims.steps(HeadNorm)),
    ),
    "norm with another epsilon": ClaimedBug(
        plants.each(HeadNorm, lambda norm: replace(norm, epsilon=norm.epsilon / 10)),
        ("gqa/qk_norm", "none"),
        claims.several_and(claims.steps(HeadNorm), claims.at(SINGLE)),
    ),
    "norm after rotary": ClaimedBug(
        plants.changed_problem(lambda p: replace(p, after=p.after[::-1])),
        ("gqa/qk_norm", "none"),
        claims.several_and(claims.steps(HeadNorm, Turn)),
    ),
    # Dropout.
    "dropout where none belongs": ClaimedBug(
        {"dropped": plants.dropping}, _PLAIN, lambda c, p, u: p.kept is None
    ),
    "dropout without 1/keep": ClaimedBug(
        {"dropped": lambda right, p, w: w * torch.tensor(p.kept > 0)},
        ("gqa/dropout", "dropout"),
        lambda c, p, u: p.kept is not None,
    ),
    "kept and dropped swapped": ClaimedBug(
        {"dropped": lambda right, p, w: w * torch.tensor(np.where(p.kept > 0, 0, p.kept.max()))},
        ("gqa/dropout", "dropout"),
        lambda c, p, u: p.kept is not None,
    ),
    # Gradients.
    "gradient stopped at the queries": ClaimedBug(plants.stopped("q"), _PLAIN, claims.several),
    "gradient stopped at the keys": ClaimedBug(
        plants.stopped("k"), ("gqa", "window"), claims.several
    ),
    "gradient stopped at the values": ClaimedBug(plants.stopped("v"), _PLAIN, claims.always),
    "gradients of a group not summed": ClaimedBug(
        {"shared": plants.one_head_sends}, _NONE, lambda c, p, u: p.num_kv_heads < p.num_heads
    ),
    # The cache.
    "cached values in another order than keys": ClaimedBug(
        {"slots": lambda right, p, v: right(p, v.roll(1, dims=-2))},
        _PIECES,
        claims.several_and(claims.cached("cached", "cached_ragged", "cached_rotary")),
    ),
    # Edges of shipped tiles and pages.
    "the last tile of keys dropped": ClaimedBug(
        plants.changed_problem(plants.last_tile_dropped), _NONE, claims.several_tiles
    ),
    "tiles summed by maxima of their own": ClaimedBug(
        {"softmax": plants.own_maximum}, _NONE, claims.several_tiles
    ),
    "gradient of the last tile of keys lost": ClaimedBug(
        {"branch": plants.last_tile_stopped}, _NONE, claims.several_tiles
    ),
    "the last token of a page forgotten": ClaimedBug(
        plants.masked(plants.page_edge_forgotten), _PIECES, claims.several_pages
    ),
    # Extra keys.
    **EXTRA_KEY_BUGS,
}

WEAK = frozenset(
    {
        "scale 1% too large",
        "scale 1% too small",
        "scale by one feature more",
        "scale by all features",
        "scale twice",
        "no scale",
        "softmax with 1 more below",
        "norm with another epsilon",
        "dropout where none belongs",
        "dropout without 1/keep",
        "gradient stopped at the queries",
        "gradient stopped at the keys",
        "gradient stopped at the learned key",
        "zero key left out",
        "zeros projected to the zero key",
        "one sink for all heads",
        "sinks scaled",
    }
)
"""The bugs that are the hardest to detect. `verify` tries these on every row that claims them.

For the others, `power` shows that each is far over the budget of every row that claims it.
"""
