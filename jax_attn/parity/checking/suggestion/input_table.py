"""Table of the arrays that may be passed for a parameter of a call, by its name.

For each parameter, the most revealing array comes first. Letters of axes: B batch, T queries, S
keys of a memory, E an encoder's tokens (S if there is a decoder, else T), L tokens inside the model
if their number is not T (patches), D width, N heads, H head_dim, M = B·N, C channels, Y and X an
image's sides, P patches, F features.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

from jax_attn.parity.checking.suggestion.reference_sizes import ReferenceSizes

Lengths = Mapping[str, int]
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Choice:
    """An array that may be passed for a parameter. axes: letters, or numbers for a width."""

    axes: tuple[str | int, ...]
    draw: Draw

    def shape(self, lengths: Lengths) -> tuple[int, ...] | None:
        """Return the shape, or None if an axis has no length here."""
        sizes = [x if isinstance(x, int) else lengths.get(x) for x in self.axes]
        return None if None in sizes else tuple(x for x in sizes if x is not None)


# --- random numbers -------------------------------------------------------------------------------


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def _below(limit: int, once: int | None = None, end: int | None = None) -> Draw:
    """Return a drawer of integers below `limit`, with as many different ones as fit.

    once: an id that occurs once. end: an id that occurs twice in each row. The first, about two
    thirds into the row, sees many keys if a model pools there, and must not see those after it; the
    second is last.
    """

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        is_end = np.zeros(shape, bool)
        if end is not None:
            rows, T = np.arange(shape[0]), shape[1]
            is_end[rows, 2 * T // 3 + rows % max(T // 5, 1)] = is_end[:, -1] = True
        free = int((~is_end).sum())
        usual = np.array([x for x in range(limit) if x not in (once, end)] or [0])
        ids = rng.permutation(np.resize(rng.permutation(usual), free))
        if once is not None and free > 1:
            ids[free // 2] = once
        array = np.full(shape, end or 0)
        array[~is_end] = ids
        return array

    return draw


def _distinct(limit: int) -> Draw:
    """Return a drawer of positions that are distinct within a row and in random order."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        most = max(shape[-1], min(limit, 2 * shape[-1]))
        rows = [rng.permutation(most)[: shape[-1]] for _ in range(int(np.prod(shape[:-1])))]
        return np.array(rows).reshape(shape)

    return draw


def _count(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(shape[0]) + 2


def _wave(function: Callable[[np.ndarray], np.ndarray]) -> Draw:
    """Return a drawer of cos or sin of rotary angles; both use the same positions."""

    def draw(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        positions = _distinct(2**10)(np.random.default_rng(shape), shape[:-1])
        exponents = np.resize(np.arange(shape[-1] // 2), shape[-1]) / max(shape[-1] // 2, 1)
        return function(positions[..., None] * 10000.0**-exponents)

    return draw


# --- choices by name ------------------------------------------------------------------------------


def _ids(axes: str) -> Callable[[str, ReferenceSizes], list[Choice]]:
    def choices(name: str, sizes: ReferenceSizes) -> list[Choice]:
        table = sizes.embedding("")
        limit = table.num_embeddings if table else sizes.first("vocabulary", 2)
        limit = sizes.first("vocabulary", limit)
        once = table.padding_idx if table and limit > 2 else None
        end = next((x for x in sizes.all("end") if x < limit and x != once), None)
        return [Choice(tuple(axes), _below(limit, once, end))]

    return choices


def _types(name: str, sizes: ReferenceSizes) -> list[Choice]:
    """Return types per token or per row, as many as the embedding of a similar name has."""
    table = sizes.embedding(re.sub(r"_?ids?$|s$", "", name))
    draw = _below(table.num_embeddings if table else 2)
    return [Choice(("B", "E"), draw), Choice(("B",), draw)]


def _positions(name: str, sizes: ReferenceSizes) -> list[Choice]:
    draw = _distinct(sizes.first("positions", 2**10))
    axis = "S" if "key" in name else "T" if "decoder" in name else "E"
    return [Choice(("B", axis), draw), Choice((axis,), draw)]


def _floats(*axes: str) -> Callable[[str, ReferenceSizes], list[Choice]]:
    return lambda name, sizes: [Choice(tuple(letters), _normal) for letters in axes]


def _signal(name: str, sizes: ReferenceSizes) -> list[Choice]:
    """Return a spectrogram; Whisper's has two columns for each of all its positions."""
    whole = [Choice(("B", "F", 2 * n), _normal) for n in sizes.all("source")]
    return whole + _floats("BFT")(name, sizes)


def _memory(name: str, sizes: ReferenceSizes) -> list[Choice]:
    widths = sizes.widths("value_width" if name.startswith("v") else "key_width")
    return _by_width("S", widths, sizes) + _floats("BNSH")(name, sizes)


def _by_width(axis: str, widths: list[int], sizes: ReferenceSizes) -> list[Choice]:
    first, second = ("B", axis) if sizes.batch_first else (axis, "B")
    return [Choice((first, second, D), _normal) for D in widths]


# Classes of layers whose second axis is channels, the attribute that counts them, the axes after.
_BY_CHANNEL = (
    (nn.Conv1d, "in_channels", "T"),
    (nn.Conv2d, "in_channels", "YX"),
    (nn.BatchNorm1d, "num_features", "T"),
    (nn.GroupNorm, "num_channels", "T"),
    (nn.BatchNorm2d, "num_features", "YX"),
)


def _tokens(name: str, sizes: ReferenceSizes) -> list[Choice]:
    """Return what the first layer takes: ids, an image or a signal; else floats of known widths."""
    axis = "E" if name == "inputs_embeds" else "T"
    first, widths = sizes.first_layer(), sizes.widths("width")
    by_layer: list[Choice] = []
    if isinstance(first, nn.Embedding):
        by_layer = _ids(f"B{axis}")(name, sizes)
    for kind, channels, axes in _BY_CHANNEL:
        if isinstance(first, kind):
            by_layer = [Choice(("B", getattr(first, channels), *axes), _normal)]
    return by_layer + _by_width(axis, widths, sizes) + _floats("BNTH")(name, sizes)


_CHOICES: tuple[tuple[str, Callable[[str, ReferenceSizes], list[Choice]]], ...] = (
    ("decoder_input_ids", _ids("BT")),
    ("(input_|token_)?ids|tokens?|idx|indices", _ids("BE")),
    (r".*positions?(_ids)?|pos|input_pos", _positions),
    (r".*_ids?|langs?|language|.*types?|segments?", _types),
    (r".*lengths?|seq_lens?", lambda *_: [Choice(("B",), _count)]),
    ("cos", lambda *_: [Choice(("B", "T", "H"), _wave(np.cos))]),
    ("sin", lambda *_: [Choice(("B", "T", "H"), _wave(np.sin))]),
    ("(attn_|attention_|position_|score_)?bias", _floats("BNTS", "NTS", "TS")),
    ("bool_masked_pos", lambda *_: [Choice(("B", "P"), lambda g, s: g.random(s) < 0.3)]),
    ("pixel_values|images?|img", _floats("BCYX")),
    ("sample", _tokens),
    ("timesteps?", lambda *_: [Choice(("B",), _below(1000))]),
    ("input_features", _signal),
    ("input_values|waveforms?|audio", _floats("BE", "BTF")),
    (r"keys?|values?|[kv]|(x_)?kv|context|memory|encoder_(hidden_states?|out(puts?)?)", _memory),
    (
        r"x(_q)?|inputs?|src|tgt|quer(y|ies)|q|h|hidden(_states?)?|.*embeds|embeddings|features",
        _tokens,
    ),
)
_CONTENT = re.compile(
    r".*input_ids|pixel_values|images?|input_features|.*embeds|x|.*hidden_states|keys?|values?"
)
# This excludes counts, such as transformers' `logits_to_keep`.
_MASK = re.compile(r"(?!(num|n|max)_|.*_to_keep).*(mask|padding|allowed|keep).*")


def row_of(name: str) -> Callable[[str, ReferenceSizes], list[Choice]] | None:
    """Return the function that makes choices for this name, or None; masks have separate rules."""
    return next((make for names, make in _CHOICES if re.fullmatch(names, name.lower())), None)


def is_mask(name: str) -> bool:
    return bool(_MASK.fullmatch(name.lower())) and row_of(name) is None


def is_position(name: str) -> bool:
    return row_of(name) is _positions


def may_be_asked_for(name: str) -> bool:
    """Return whether a model may need this parameter although it has a default."""
    return bool(_CONTENT.fullmatch(name.lower()))


def choices_of(name: str, sizes: ReferenceSizes) -> list[Choice]:
    """Return the choices for a parameter; empty if no row of the table has its name."""
    make = row_of(name)
    return make(name.lower(), sizes) if make else []


# --- masks ----------------------------------------------------------------------------------------

_BY_PAIR = "BTS BTT B1TS B1TT MTS MTT TS TT BS BE BT B1LL BL"
_BY_KEY = "BE BS BT BL B1TT B1TS B1LL TT TS"
_OF_KEYS = re.compile(r".*attention_mask|.*pad.*|.*keep.*")
_OF_WHICH = {"decoder": "BT ", "tgt": "BT ", "encoder": "BS ", "memory": "BS "}
ADDED = "added"


@dataclass(frozen=True)
class MaskForm:
    """A possible form of a mask.

    dtype: a dtype, or `ADDED` for floats that are added to the scores. true_shows: whether True
    shows a key; otherwise it hides it.
    """

    shape: tuple[int, ...]
    dtype: str
    true_shows: bool = True

    def mask(self, rng: np.random.Generator, lowest: float, *, empty: bool = False) -> np.ndarray:
        """Draw a mask of `shown_keys`. lowest: the number added to the score of a hidden key."""
        return self._spelled(shown_keys(rng, self.shape, empty=empty), lowest)

    def probe(self, lowest: float) -> np.ndarray:
        """Return a mask that hides the second key; a causal first query needs the first key."""
        return self._spelled(np.broadcast_to(np.arange(self.shape[-1]) != 1, self.shape), lowest)

    def _spelled(self, shown: np.ndarray, lowest: float) -> np.ndarray:
        says = shown == self.true_shows
        return np.where(says, 0.0, lowest) if self.dtype == ADDED else says.astype(self.dtype)


def mask_forms(name: str, lengths: Lengths) -> list[MaskForm]:
    """Return the possible forms of a mask by its name.

    Names of transformers' masks and of padding masks suggest integers per key.
    """
    plain = name.lower()
    spelled = _BY_PAIR
    if _OF_KEYS.fullmatch(plain):
        whose = next((axes for side, axes in _OF_WHICH.items() if plain.startswith(side)), "")
        spelled = whose + _BY_KEY
    letters = spelled.split()
    axes = [Choice(tuple(1 if x == "1" else x for x in word), _normal) for word in letters]
    shapes = dict.fromkeys(shape for choice in axes if (shape := choice.shape(lengths)))
    dtypes = ("int64", "bool") if plain.endswith("attention_mask") else ("bool", "int64")
    return [MaskForm(shape, dtype) for shape in shapes for dtype in (*dtypes, ADDED)]


def shown_keys(rng: np.random.Generator, shape: tuple[int, ...], *, empty: bool) -> np.ndarray:
    """Draw a boolean array, True where a key is visible.

    One key is hidden in the first row, and several in each other row; each row sees the first key
    and its own. empty: whether to hide all keys of the last row, and also the first key of the row
    before it, which leaves a causal first query without keys.
    """
    S = shape[-1]
    shown = np.ones((int(np.prod(shape[:-1])), S), bool)
    queries = shape[-2] if len(shape) > 1 and shape[-2] > 1 else S
    for i, row in enumerate(shown):
        others = [j for j in range(1, S) if j != i % queries]
        row[rng.permutation(others)[: 1 if i == 0 else max(2, S // 3)]] = False
    if empty:
        shown[-2:, 0] = False
        shown[-1] = False
    return shown.reshape(shape)
