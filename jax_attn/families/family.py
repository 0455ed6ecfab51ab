"""A family of models: the traits of its attention, and the transfer tables of its weights.

A family is data about other people's checkpoints. `traits` reads from a config what the models do.
The tables carry the weights of a block, or of a whole file, to Flax paths that are the same in
every family, those of `jax_attn.models`:

    token_embedding  position_embedding  type_embedding  embedding_norm  embedding_projection
    layers.{layer}.attention_norm  .attention  .mlp_norm  .mlp.{up,gate,down}
    layers.{layer}.mlp.router  .mlp.experts.{up,gate,down}  (a mixture of experts)
    layers.{layer}.attention_out_norm  .mlp_out_norm        (sandwich norms)
    final_norm  output_projection
    pooler  lm_head  classifier  token_classifier  qa_outputs  seq_relationship
    patch_embedding  cls_token  mask_token          (of images)

`attention` is a module of this package (q_proj, k_proj, v_proj, out_proj, q_norm, k_norm,
position_bias, sinks). Kernels are (in, out); a norm has a scale and a bias, an embedding an
embedding. Encoder-decoders have `encoder.` and `decoder.` before `layers` and `final_norm`, and in
the layers of the decoder `cross_attention_norm` and `cross_attention`. This module imports no
framework.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from jax_attn.families.config import DECODER_LAYERS, LAYERS, Config, Reading, reading
from jax_attn.families.traits import ModelTraits, Traits
from jax_attn.families.whole import architecture, check_supported, check_values, refuse_unread
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout, optional, spellings
from jax_attn.transfer.table.rows import bindings, filled

_NAMED = 8
"""The number of layers that a message names at most."""
_PARTS, _TRIED = (1, 2), 8
"""The numbers of a key's parts that may be a trainer's prefix, and how many prefixes are tried."""
_CLASS = re.compile(
    r"(?P<stem>\w+?)(?:For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|EncoderModel|PreTrainedModel|ModelWithLMHead|"
    r"Model|Backbone)"
)
"""The name of a class of transformers; its stem is a model_type without hyphens and underscores."""
_COUNTS = ("max_position_embeddings", "intermediate_size")
"""Numbers that many configs have and that are checked even if no table or trait reads them."""


class Prefixes(NamedTuple):
    """The place of one block: its prefix in the file, and in the ported model."""

    torch: str
    flax: str = "layers.{layer}.attention"


@dataclass(frozen=True)
class Family:
    """One family: how to recognise it, where its blocks are, and its tables.

    name: as `jax-attn inspect` prints it, and a model_type of configs.
    block_of(config): the table between a block's keys and its attention module, without prefixes.
    rest_of(config): the table of all other keys after the root.
    head_of(config): the table of the keys that have no root.
    traits_of(config, torch prefix): the traits of the block at this prefix.
    places: the places of blocks, after the root, with {layer} for the layer's number; two places
        with one Flax path are two spellings of one block. A function of the config, if that decides
        on them; those of an encoder come before its decoder's.
    roots: the possible prefixes of every key except the head's, such as "bert"; "" for none.
    new_root(config): the root that transformers writes; the first of `roots` by default.
    also: further model_types with the same tables. known_by: the keys that identify a config of
        this family if its configs have no model_type.
    without_model: the model_types of the family that have no whole model here.
    model_of(config, attention): the traits of a whole model, given those of each layer's attention;
        None if the family has no whole model here.
    optional_of(config): the Flax parts of the rest that a file may lack; it must have all others.
        A file may lack every head, except that of a model whose config names a causal language
        model with an untied head.
    settled(config, keys): the config, with what the keys of a file decide.

    A missing key has transformers' default, except the number of layers. Every method raises one
    TransferError for a config that has unsupported values, or lacks one that has no default; the
    error lists all of them, whichever of them the method reads.
    """

    name: str
    block_of: Callable[[Reading], Layout]
    rest_of: Callable[[Reading], Layout]
    head_of: Callable[[Reading], Layout]
    traits_of: Callable[[Reading, str], Traits]
    places: tuple[Prefixes, ...] | Callable[[Reading], tuple[Prefixes, ...]]
    roots: tuple[str, ...] = ("transformer", "")
    new_root: Callable[[Reading], str] | None = None
    also: tuple[str, ...] = ()
    known_by: tuple[str, ...] = ()
    model_of: Callable[[Reading, tuple[Traits, ...]], ModelTraits] | None = None
    without_model: tuple[str, ...] = ()
    optional_of: Callable[[Reading], tuple[str, ...]] = lambda config: ()
    settled: Callable[[Config, Collection[str]], Config] = lambda config, keys: config

    @property
    def model_types(self) -> tuple[str, ...]:
        """The model_types in configs of this family; () if these have none."""
        return () if self.known_by else (self.name, *self.also)

    def model_type(self, config: Config) -> str | None:
        """Return the model_type of a config, or that of the family which its class names.

        None if that is none of this family.
        """
        return type_of(config, self.model_types)

    @property
    def types_of_models(self) -> tuple[str, ...]:
        """The model_types that have a whole model here."""
        if self.model_of is None:
            return ()
        return tuple(kind for kind in self.model_types if kind not in self.without_model)

    def block(self, config: Config) -> Layout:
        """Return the table of one block, without a prefix."""
        with self._reading(config) as read:
            return optional(self.block_of(read))

    def traits(self, config: Config, prefix: str) -> Traits:
        """Return the traits of the block at this torch prefix."""
        with self._reading(config) as read:
            return self.traits_of(read, prefix)

    def model_traits(self, config: Config, layers: Sequence[int] | None = None) -> ModelTraits:
        """Return the traits of a whole model, or of only these `layers` of it."""
        kind = self.model_type(config)
        if self.model_of is None or kind in self.without_model:
            name = kind if kind in self.without_model else self.name
            text = f"whole models of the family {name} are not supported, only their attention"
            raise TransferError("reading the config", [Problem("refused", "model", text)])
        with self._reading(config) as read:
            (pattern, _), *_ = self.places_in(read)

            def attention(layer: int) -> Traits:
                return self.traits_of(read, *filled((pattern,), (("layer", str(layer)),)))

            count = read.number(*LAYERS)
            numbers = range(count) if layers is None else layers
            model = self.model_of(read, tuple(map(attention, numbers)))
            check_supported(read, is_causal=attention(0).is_causal)
            refuse_unread(read)
            return model

    def beside(self, config: Config, keys: Iterable[str]) -> tuple[Layout, frozenset[str]]:
        """Return the table of all but the blocks, and the Flax parts of it that a file may lack."""
        keys = list(keys)
        with self._reading(self.settled(config, keys)) as read:
            rest, head = self.rest_of(read), self.head_of(read)
            may_lack = frozenset(self.optional_of(read))
        heads = {path.split(".")[0] for path in head.flax_paths()}
        heads -= {"lm_head"} if _has_own_head(config, head) else set()
        whole = rest.under(self.root(config, keys), "") + head
        return optional(whole).spelled_as(keys), may_lack | heads

    def places_in(self, config: Reading) -> tuple[Prefixes, ...]:
        """Return the places of blocks in a model of this config."""
        return self.places(config) if callable(self.places) else self.places

    def look_through(self, config: Reading) -> None:
        """Read every value of a config once, so that all problems are collected."""
        check_values(config)
        for read in (self.block_of, self.rest_of, self.head_of, self.optional_of):
            read(config)
        for place in self.places_in(config):
            self.traits_of(config, *filled((place.torch,), (("layer", "0"),)))
        for name in _COUNTS:
            config.number(name, default=None)
        for name in (*LAYERS, *DECODER_LAYERS):
            config.number(name, default=None, least=0)

    def root(self, config: Config, keys: Iterable[str]) -> str:
        """Return the root of the blocks in a file with these keys; without keys, a new file's."""
        keys = list(keys)
        if not keys and self.new_root is not None:
            return self.new_root(Reading(self._typed(config)))
        return max(self.roots, key=lambda root: len(self._places(config, keys, root)))

    def blocks(self, config: Config, keys: Iterable[str]) -> list[Prefixes]:
        """List the attention blocks of a file with these keys, layer by layer."""
        keys = list(keys)
        return self._places(config, keys, self.root(config, keys))

    def model(self, config: Config, keys: Iterable[str]) -> Layout:
        """Return the table of a whole file: every key has a row, or is ignored for a stated reason.

        keys: those of the file. They may have a root, and choose one of several spellings.
        """
        keys = list(keys)
        with self._reading(self.settled(config, keys)) as read:
            block, rest, head = self.block_of(read), self.rest_of(read), self.head_of(read)
            places = self.places_in(read)
        spelled: dict[str, list[Layout]] = {}
        for place in places:
            spelled.setdefault(place.flax, []).append(block.under(*place))
        blocks = (spellings(*layouts) for layouts in spelled.values())
        behind = Layout(*blocks, rest)
        whole = behind.under(self.root(config, keys), "") + head
        return optional(whole).spelled_as(keys)

    def _places(self, config: Config, keys: list[str], root: str) -> list[Prefixes]:
        """List the blocks that have at least one key after this root."""
        places, block = [], self.block(config).torch_keys()
        for place in self.places_in(Reading(self._typed(config))):
            prefix = f"{root}.{place.torch}" if root else place.torch
            patterns = [f"{prefix}.{key}" for key in block]
            for binding in sorted(bindings(patterns, keys), key=lambda b: [int(n) for _, n in b]):
                places.append(Prefixes(*filled((prefix, place.flax), binding)))
        return places

    @contextmanager
    def _reading(self, config: Config) -> Iterator[Reading]:
        with reading(self._typed(config)) as read:
            self.look_through(read)
            yield read

    def _typed(self, config: Config) -> Config:
        """Return the config with its model_type, if it lacks it and names a class of the family."""
        kind = self.model_type(config)
        return config if kind is None else {**config, "model_type": kind}


def type_of(config: Config, kinds: Iterable[str]) -> str | None:
    """Return the model_type of a config; without one, that of `kinds` which its class names.

    None if its class names none of them. Old configs, and those written by hand, may have only
    `architectures`, such as ["LlamaForCausalLM"].
    """
    if (kind := config.get("model_type")) is not None:
        return kind
    if not (match := _CLASS.fullmatch(architecture(Reading(config)))):
        return None
    names = {name.replace("-", "").replace("_", ""): name for name in kinds}
    stem = match["stem"].lower()
    # Gemma3ForCausalLM has a gemma3_text; Gemma3Model also reads images.
    is_of_text = match[0].endswith("ForCausalLM")
    return names.get(stem, names.get(f"{stem}text") if is_of_text else None)


def _has_own_head(config: Config, head: Layout) -> bool:
    is_causal = architecture(Reading(config)).endswith(("ForCausalLM", "LMHeadModel"))
    return is_causal and "lm_head.kernel" in head.flax_paths()


def other_layers(config: Config, blocks: Iterable[Prefixes]) -> list[Problem]:
    """Report layers that the config counts and the checkpoint lacks, or the reverse."""
    by_stem: dict[str, set[int]] = defaultdict(set)  # the text before the number -> layers
    for place in blocks:
        stem, layer, _ = re.split(r"(\d+)", place.torch, maxsplit=1)
        by_stem[stem].add(int(layer))
    problems: list[Problem] = []
    for stem, layers in (by_stem or {"layer ": set()}).items():
        read = Reading(config)
        count = read.number(*LAYERS, default=None, least=0)
        if "decoder" in stem.split("."):
            count = read.number(*DECODER_LAYERS, default=count, least=0)
        problems += read.problems
        if count is None or read.problems:
            continue
        if more := sorted(layer for layer in layers if layer >= count)[:_NAMED]:
            text = f"expected attention in {count} layers, as config.json says, got it in {more}"
            problems.append(Problem("unexpected", f"{stem}{more[0]}", text))
        if gone := gaps(layers, count):
            text = f"expected attention in {count} layers, as config.json says, but none in {gone}"
            problems.append(Problem("missing", f"{stem}{gone[0]}", text))
    return list(dict.fromkeys(problems))


def prefixed(family: Family, config: Config, keys: Iterable[str]) -> list[Problem]:
    """Report a prefix that a trainer added to the keys, if the layers are found only without it."""
    keys = list(keys)
    if family.blocks(config, keys):
        return []
    firsts = (".".join(key.split(".")[:n]) for key in keys for n in _PARTS if key.count(".") >= n)
    for prefix, count in Counter(f"{first}." for first in firsts).most_common(_TRIED):
        if family.blocks(config, [key.removeprefix(prefix) for key in keys]):
            text = f"{count} of {len(keys)} keys begin with it, and layers are found without it"
            hint = f"strip it: --strip {prefix}, or strip={prefix!r} in models.load"
            return [Problem("unexpected", prefix, text, hint)]
    return []


def gaps(layers: set[int], count: int) -> list[int]:
    """List the first missing layers of `count`, however large `count` is."""
    looked_at = range(min(count, len(layers) + _NAMED))
    return [layer for layer in looked_at if layer not in layers][:_NAMED]
