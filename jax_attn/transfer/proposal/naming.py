"""Agreement of two dotted names, one of torch and one of Flax, regardless of shapes.

A name is read as words: "encoder.layer.3.attention.self.query" is the `q` of layer 3, in the
context `encoder`, `attn` and `self`. The words below are synonyms that projects use. Similar
spelling never counts: it would take "key" for "ky" and "k1" for "k2".
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import combinations

from jax_attn.transfer.table import spellings

Words = frozenset[str]

_WORDS = {
    word: meaning
    for meaning, words in {
        **spellings.WORDS,
        "norm": "norm ln layernorm rmsnorm batchnorm groupnorm",
        "attn": "attn attention att mha",
        "mlp": "mlp ffn ff feedforward",
        "fc": "fc wi intermediate",
        "token": "token tokens tok word words wte vocab",
        "position": "position positions pos wpe",
        "type": "type types segment",
        "embedding": "embedding embeddings embed emb",
        "cross": "cross crossattention encdec",
        "final": "final",
        "up": "up",
        "gate": "gate",
        "down": "down",
        "head": "head",
        "self": "self",
        "encoder": "encoder enc",
        "decoder": "decoder dec",
    }.items()
    for word in words.split()
}
_TOKENS = {module: frozenset({role}) for module, role in spellings.ROLES.items()}
_TOKENS |= {
    token: frozenset(words.split())
    for token, words in {
        "ln_f": "final norm",
        "norm_f": "final norm",
        "selfattn": "self attn",
        "selfattention": "self attn",
        "crossattention": "cross attn",
        "encdecattention": "cross attn",
        "encoder_attn": "cross attn",
        "densereludense": "mlp",
        "feed_forward": "mlp",
        "dense_h_to_4h": "up",
        "dense_4h_to_h": "down",
        "token_type_embeddings": "type",
    }.items()
}
# Words for any layer or linear map.
_FILLERS = frozenset(
    {"proj", "projection", "linear", "lin", "dense", "layer", "layers", "block", "blocks", "h"}
    | {"w", "c", "to", "model", "module", "transformer"}
)
_PLACES = ({"encoder", "decoder"}, {"self", "cross"}, {"attn", "mlp"})
_ROLES = (
    {"q", "k", "v", "out", "qkv", "kv"},
    {"up", "gate", "down"},
    {"token", "position", "type"},
)
# Names of one kind, which shapes may distinguish.
_KINDS = (
    frozenset({"mlp", "fc", "up", "gate", "down"}),
    frozenset({"embedding", "token", "position", "type"}),
)
_GENERIC = tuple(map(frozenset, ({"norm"}, {"head"}, {"out"}, {"fc"}, {"mlp"}, {"embedding"})))
_PROJECTIONS = ({"q", "k", "v"}, {"qkv"}, {"q", "kv"})
_IMPLIED = ((_ROLES[0] - {"out"}, {"attn"}), (_KINDS[0], {"mlp"}), (_KINDS[1], {"embedding"}))
_TELLING = frozenset({"self", "cross", "attn", "mlp", "embedding"})

_SPLIT = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_NUMBER_AT_END = re.compile(r"(0|[1-9]\d*)\Z")


class Bond(IntEnum):
    """Degree of agreement of two names, the closest first; NONE is no evidence."""

    SAME = 0
    AGREE = 1
    AGREE_AROUND = 2
    AKIN = 3
    NONE = 4

    @property
    def text(self) -> str:
        return _BONDS[self]


_BONDS = (
    "the same name",
    "the names agree",
    "the names agree, those around them nearly",
    "names of one kind",
    "nothing but the shape",
)


@dataclass(frozen=True)
class Number:
    """An integer at the end of a part of a dotted name.

    token: index of the part; owner: words for what is numbered.
    """

    owner: Words
    value: int
    token: int


@dataclass(frozen=True)
class ModuleName:
    """A module's dotted name, parsed.

    role: the words for the module itself, or for its container if the last part is `bare`, that is
    without meaning ("dense", "c_proj", "0"). context: all other words. numbers: all of them;
    layered: whether one of them counts containers of the module.
    """

    tokens: tuple[str, ...]
    role: Words
    bare: bool
    context: Words
    numbers: tuple[Number, ...]
    layered: bool


def read(dotted: Iterable[Sequence[str]]) -> list[ModuleName]:
    """Parse all names of one side, each given as the parts between its dots."""
    names = [_read(tuple(tokens)) for tokens in dotted]
    siblings: dict[tuple[str, ...], list[ModuleName]] = {}
    for name in names:
        siblings.setdefault(name.tokens[:-1], []).append(name)
    names = [_as_output(name, siblings[name.tokens[:-1]]) for name in names]
    # A word that all names share distinguishes none of them.
    layered = [n.context for n in names if n.layered]
    plain = [n.context for n in names if not n.layered and (n.context or not layered)]
    common = {True: _common(layered), False: _common(layered + plain)}
    return [replace(n, context=n.context - common[n.layered]) for n in names]


def bond(torch: ModuleName, flax: ModuleName) -> Bond | None:
    """Return the bond of two names, or None if they contradict each other."""
    ways = aligned(torch.numbers, flax.numbers)
    if not ways or torch.layered != flax.layered or contradict(torch, flax):
        return None
    elsewhere = (torch.context ^ flax.context) - _loose(torch.role | flax.role)
    if len(ways) > 1 or elsewhere:
        return Bond.NONE
    numbered_alike = len(torch.numbers) == len(flax.numbers)
    around_alike = torch.context == flax.context and numbered_alike
    if around_alike and torch.role == flax.role and _last(torch) == _last(flax):
        return Bond.SAME
    if torch.bare and flax.bare:
        return Bond.NONE
    if torch.role == flax.role and torch.role:
        if _of_many(torch) or not numbered_alike:
            return Bond.AKIN
        return Bond.AGREE if around_alike else Bond.AGREE_AROUND
    return Bond.AKIN if _akin(torch.role, flax.role) else Bond.NONE


def aligned(torch: Sequence[Number], flax: Sequence[Number]) -> list[list[tuple[Number, Number]]]:
    """Return every way to pair the shorter side's numbers with equal ones, in order."""
    if len(torch) > len(flax):
        return [[(a, b) for b, a in way] for way in aligned(flax, torch)]
    owners = {number.owner for number in flax}
    own = {number.owner for number in torch}
    return [
        list(zip(torch, chosen, strict=True))
        for chosen in combinations(flax, len(torch))
        if all(
            a.value == b.value and (a.owner == b.owner or not (a.owner in owners or b.owner in own))
            for a, b in zip(torch, chosen, strict=True)
        )
    ]


def _read(tokens: tuple[str, ...]) -> ModuleName:
    parts: list[tuple[Words, bool]] = []
    numbers: list[Number] = []
    before = Words()
    for i, token in enumerate(tokens):
        digits = match[0] if (match := _NUMBER_AT_END.search(token)) else ""
        stem = token.removesuffix(digits)
        words = _words(stem) if stem else before
        if digits:
            # "linear1" does not count layers: the module itself is one of several.
            own = stem and not words and i == len(tokens) - 1
            owner = frozenset({stem.lower()}) if own else words
            numbers.append(Number(owner, int(digits), i))
        parts.append((words if stem else Words(), bool(digits)))
        before = words
    at = _role_at(parts, numbers)
    role = parts[at][0] if at is not None else frozenset()
    context = frozenset().union(*(words for i, (words, _) in enumerate(parts) if i != at))
    layered = any(at is None or number.token < at for number in numbers)
    return ModuleName(tokens, role, at != len(tokens) - 1, context, tuple(numbers), layered)


def _role_at(parts: list[tuple[Words, bool]], numbers: list[Number]) -> int | None:
    """Return the index of the last part with a word, unless a later part only numbers layers."""
    layers = {number.token for number in numbers if not number.owner}
    for i in reversed(range(len(parts))):
        if parts[i][0]:
            return i
        if i in layers and i < len(parts) - 1:
            return None
    return None


def _words(stem: str) -> Words:
    token = stem.lower().strip("_")
    if token in _TOKENS:
        return _TOKENS[token]
    if token in _WORDS:
        return frozenset({_WORDS[token]})
    words = {_WORDS.get(word, word) for word in spelled(stem)} - _FILLERS
    for parts, whole in (
        ({"q", "k", "v"}, "qkv"),
        ({"k", "v"}, "kv"),
        ({"feed", "forward"}, "mlp"),
    ):
        if parts <= words:
            words = words - parts | {whole}
    if words & _ROLES[2] or len(words & _KINDS[0]) > 1:
        words -= {"embedding", "fc"}
    return frozenset(words)


def spelled(token: str) -> set[str]:
    """Return the words and numbers of a part of a dotted name, as they are spelled."""
    return {word.lower() for word in _SPLIT.findall(token)}


def _as_output(name: ModuleName, siblings: list[ModuleName]) -> ModuleName:
    """Give the role "out" to the output projection next to query, key and value.

    It is a module called "out", if there is only attention, or the only one called "dense" or
    "c_proj".
    """
    roles = frozenset().union(*(n.role for n in siblings))
    if not any(projections <= roles for projections in _PROJECTIONS):
        return name
    # A number before the last part counts layers, which have more than attention in them.
    in_attention = not name.tokens[-2:-1] or not name.tokens[-2].isdecimal()
    only_attention = in_attention and roles <= _ROLES[0] | {"norm", "attn", "self"}
    is_of_attention = "attn" in name.role or (not name.role and only_attention)
    lone = name.bare and is_of_attention and sum(n.bare for n in siblings) == 1
    out = name.role == {"out"} and only_attention
    if not (lone or out):
        return name
    context = name.context | (name.role - {"out"}) | {"attn"}
    return replace(name, role=frozenset({"out"}), bare=name.bare and not lone, context=context)


def _common(contexts: list[Words]) -> Words:
    return frozenset.intersection(*contexts) - _TELLING if contexts else frozenset()


def _loose(role: Words) -> Words:
    """Return words that a name of this role implies, so that its context may omit them."""
    return frozenset().union({"self"}, *(words for kind, words in _IMPLIED if role & kind))


def contradict(a: ModuleName, b: ModuleName) -> bool:
    """Return whether the names have different words of one set of exclusive words."""
    return any(_apart(group, _where(a), _where(b)) for group in _PLACES) or any(
        _apart(group, a.role, b.role) for group in _ROLES
    )


def _apart(group: set[str], a: Words, b: Words) -> bool:
    return bool(group & a and group & b and not group & a & b)


def _where(name: ModuleName) -> Words:
    in_mlp = name.role and name.role <= _KINDS[0] and "attn" not in name.context
    return name.context | ({"mlp"} if in_mlp else set()) | (name.role if name.bare else set())


def _of_many(name: ModuleName) -> bool:
    """Return whether other modules may have the same role, such as "norm"."""
    return name.role in _GENERIC and not (name.role == {"out"} and "attn" in name.context)


def _akin(a: Words, b: Words) -> bool:
    return any(a and b and a <= kind and b <= kind for kind in _KINDS)


def _last(name: ModuleName) -> str:
    return name.tokens[-1].lower() if name.tokens else ""
