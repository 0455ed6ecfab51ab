"""Check transformers' model against ours, both read from the same folder.

The check compares the last hidden states, logits and the gradient of every parameter, for rows
padded on either side, by lengths, and by a cache.
"""

import gc
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jax_attn.families import Config, model_family
from jax_attn.families.config import Reading
from jax_attn.families.traits import ModelTraits
from jax_attn.families.whole import architecture
from jax_attn.models import EncoderDecoder, Model
from jax_attn.models.inputs import cache_problems, longest
from jax_attn.models.model import PARTS
from jax_attn.parity.checking.check import check
from jax_attn.parity.checking.probes import selected
from jax_attn.parity.judge.result import Result
from jax_attn.transfer import Layout, Problem, TransferError, load_checkpoint
from jax_attn.transfer.arrays import specs
from jax_attn.transfer.files.port_folder import beside
from jax_attn.transfer.files.prefixes import unwrapped
from jax_attn.translate.pretrained import read_by_transformers, transformers_class

LONGEST = 13
"""Tokens in a row, or as many as the model takes if fewer."""

PART = 2**27
"""The number of parameter elements whose gradients are compared at once."""


@dataclass(frozen=True)
class ModelPair:
    """transformers' model and ours, in one dtype and eval mode, and the table between them.

    left_out: heads of the file that transformers' class does not have.
    """

    reference: torch.nn.Module
    port: Any
    traits: ModelTraits
    layout: Layout
    dtype: str
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, path: Path, config: Config, dtype: str, port: Model | EncoderDecoder
    ) -> "ModelPair":
        """Let transformers read the folder from which the port was loaded, in the same dtype."""
        family = model_family(config)
        kind, has_alibi = _class_of(config, port), port.reads.alibi is not None
        reference, unexpected = _reference(path, kind, dtype, has_alibi=has_alibi)
        traits = family.model_traits(config)
        left_out = _without_heads(port, family.model(config, unexpected), unexpected, traits)
        layout = family.model(config, reference.state_dict())
        return cls(reference, port, traits, layout, dtype, left_out)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Three rows of tokens: without padding, padded at the end, padded at the start.

        The mask of the second row shows one padding token, whose vector may get no gradient. For a
        classifier of the last token, which transformers finds by its id, the first row ends with
        the padding token although the mask shows it; without a padding token, there is one row.
        """
        embedding = self.traits.embedding
        T = LONGEST
        if (positions := embedding.positions) is not None:
            T = min(T, longest(positions))
        rng = np.random.default_rng(zlib.crc32(self.dtype.encode()))
        pad = getattr(self.reference.config, "pad_token_id", None)
        pad = pad if pad is not None and 0 <= pad < embedding.vocab_size else 0
        ids = np.delete(np.arange(embedding.vocab_size), pad)
        mask = np.ones((3, T), np.int32)
        mask[1, T - T // 3 :] = mask[2, : T // 4] = 0
        tokens = np.where(mask, rng.choice(ids, (3, T)), pad).astype(np.int32)
        tokens[1, T // 3] = pad
        if self.port.classifier is not None and self.traits.classifier.reads == "last":
            tokens[0, -1] = pad
            rows = 1 if self.traits.classifier.pad is None else 3
            tokens, mask = tokens[:rows], mask[:rows]
        arrays = {"tokens": tokens, "mask": mask}
        if embedding.types > 1:
            arrays["types"] = rng.integers(0, embedding.types, tokens.shape).astype(np.int32)
        return arrays

    @property
    def has_cache(self) -> bool:
        """True if the model can continue from a cache."""
        return not cache_problems(self.port.reads)

    def call_reference(self, module: Any, tokens: Any, mask: Any, types: Any = None) -> dict:
        """Return transformers' outputs, under a name for each way in which the port is called."""
        own = self.reference_outputs(module, tokens, mask, types)
        ways = own | {f"{name} by lengths": x[:2].detach() for name, x in own.items()}
        if self.has_cache:
            ways |= {f"{name} by a cache": own[name][:1].detach() for name in by_token(own)}
        return ways

    def reference_outputs(self, module: Any, tokens: Any, mask: Any, types: Any = None) -> dict:
        """Return transformers' outputs by a mask; those of padding are 0."""
        words = {} if types is None else {"token_type_ids": types}
        out = module(tokens, attention_mask=mask, output_hidden_states=True, **words)
        given = {
            "hidden": out.get("last_hidden_state", out.hidden_states[-1]),
            "logits": logits_of(out),
            "pooled": out.get("pooler_output"),
            "pair": out.get("seq_relationship_logits"),
        }
        return real(given, mask)

    def call_port(self, model: Any, tokens: Any, mask: Any, types: Any = None) -> dict:
        """Return our model's outputs by a mask, by lengths and, if it can, by a cache."""
        own = self.port_outputs(model, tokens, mask, types)
        shorter = None if types is None else types[:2]
        by_lengths = model(tokens[:2], mask[:2].sum(axis=1), types=shorter)
        named = self._named(by_lengths, mask[:2])
        ways = own | {f"{n} by lengths": jax.lax.stop_gradient(x) for n, x in named.items()}
        if self.has_cache:
            T = tokens.shape[1]
            start, cache = T // 2, model.empty_cache(1, T)
            before, after = (
                (None, None) if types is None else (types[:1, :start], types[:1, start:])
            )
            first = model(tokens[:1, :start], types=before, cache=cache)
            rest = model(tokens[:1, start:], types=after, cache=first.cache)
            parts = [self._named(part, mask[:1, : part.hidden.shape[1]]) for part in (first, rest)]
            for name in by_token(parts[0]):
                joined = jax.numpy.concatenate([part[name] for part in parts], axis=1)
                ways[f"{name} by a cache"] = jax.lax.stop_gradient(joined)
        return ways

    def port_outputs(self, model: Any, tokens: Any, mask: Any, types: Any = None) -> dict:
        """Return our model's outputs by a mask; those of padding are 0."""
        return self._named(model(tokens, attention_mask=mask, types=types), mask)

    def _named(self, out: Any, mask: Any) -> dict[str, Any]:
        """Return only the outputs that transformers' class has too, under its names."""
        given = {"hidden": out.hidden, "logits": out.logits, "pair": out.pair}
        if out.logits is None and out.pair is not None:  # BertForNextSentencePrediction
            given |= {"logits": out.pair, "pair": None}
        elif out.logits is None:
            given["pooled"] = out.pooled
        return real(given, mask)

    def check(self, part: int = PART, *, explain: bool = False) -> Result:
        """Check the pair. explain: add an explanation to a result that does not pass.

        part: the number of parameter elements, roughly, whose gradients are compared at once. For
        more, the check runs several times, because gradients take most of its memory.
        """
        groups = _groups(self.reference, part)
        results = []
        for group in groups:
            result = check(
                self.reference,
                self.port,
                self.inputs,
                layout=self.layout,
                reference_call=self.call_reference,
                port_call=self.call_port,
                dtype=self.dtype,
                transforms=("jit",),
                parameters=group if len(groups) > 1 else None,
            )
            results.append(result.explained() if explain else replace(result, explainer=None))
            del result
            gc.collect()  # a check's copies of the reference are in reference cycles
        total = sum(1 for _ in self.reference.named_parameters())
        limited = {selected(frozenset(group), total) for group in groups}
        return _joined(results, limited if len(groups) > 1 else set())


def _reference(
    path: Path, kind: Any, dtype: str, *, has_alibi: bool
) -> tuple[torch.nn.Module, dict[str, tuple[int, ...]]]:
    """Load transformers' model in eval mode; return it and the shapes of tensors that it ignores.

    Raises TransferError for parameters that transformers would draw at random.
    """
    found = read_by_transformers(
        beside(path),
        kind,
        dtype=getattr(torch, dtype),
        # With ALiBi, let transformers choose: Falcon's eager attention adds the bias twice.
        attn_implementation=None if has_alibi else "eager",
        # torch's products of groups take only some widths.
        experts_implementation="eager",
    )
    with load_checkpoint(path) as tensors:
        described, _ = specs(unwrapped(tensors)[0])
    return found.module, {k: s.shape for k, s in described.items() if k in found.unexpected}


def _class_of(config: Config, port: Model | EncoderDecoder) -> Any:
    """Return transformers' class for a config: the one it names, or the one with the port's head.

    Raises TransferError if the name is not that of a transformers model that reads one text.
    """
    import transformers

    name = architecture(Reading(config))
    if name.endswith("ForMultipleChoice"):
        text = f"expected a model that reads one text, got {name!r}"
        raise TransferError("reading the config", [Problem("refused", "architectures", text)])
    if name or port.lm_head is None:
        return transformers_class(config)
    if isinstance(port, EncoderDecoder):
        return transformers.AutoModelForSeq2SeqLM
    is_causal = port.reads.is_causal
    return transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForMaskedLM


def _without_heads(
    port: Model | EncoderDecoder,
    layout: Layout,
    unexpected: Mapping[str, tuple[int, ...]],
    traits: ModelTraits,
) -> tuple[str, ...]:
    """Remove the heads that transformers' class lacks from the port, and return their names.

    layout: the table of the unexpected tensors. Raises TransferError if one belongs to no head.
    """
    paths = layout.shapes(unexpected, traits.blocks[0].attention.sizes)
    parts = sorted({path.split(".")[0] for path in paths})
    if others := [part for part in parts if part not in PARTS]:
        text = "expected a part that transformers' class has, too"
        raise TransferError("the model", [Problem("unexpected", part, text) for part in others])
    for part in parts:
        setattr(port, part, nnx.data(None))
    return tuple(parts)


def _groups(module: torch.nn.Module, part: int) -> list[tuple[str, ...]]:
    """Return the names of a module's parameters, in groups of about `part` elements."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, parameter in module.named_parameters():
        if groups[-1] and size + parameter.numel() > part:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += parameter.numel()
    return [tuple(group) for group in groups]


def _joined(results: Sequence[Result], left_out: Collection[str]) -> Result:
    """Merge the results of checks of one pair that compared gradients of different parameters."""
    first, *others = results
    gradients = (t for r in others for t in r.tensors if t.kind == "gradient of parameter")
    return replace(
        first,
        tensors=(*first.tensors, *gradients),
        failures=tuple(dict.fromkeys(x for r in results for x in r.failures)),
        doubts=tuple(dict.fromkeys(x for r in results for x in r.doubts)),
        notes=tuple(
            n for n in dict.fromkeys(x for r in results for x in r.notes) if n not in left_out
        ),
        explanation=next((r.explanation for r in results if r.explanation), None),
    )


def logits_of(out: Mapping[str, Any]) -> Any:
    """Return the logits in a transformers model's output, under any of its names, or None."""
    if "start_logits" in out:
        return torch.stack([out["start_logits"], out["end_logits"]], dim=-1)
    return out.get("logits", out.get("prediction_logits"))


def real(given: Mapping[str, Any], mask: Any) -> dict[str, Any]:
    """Return the outputs that are not None; those of padding are 0."""
    return {
        name: x * mask[..., None].astype(x.dtype)
        if isinstance(x, jax.Array) and x.ndim == 3
        else x * mask[..., None].to(x.dtype)
        if x.ndim == 3
        else x
        for name, x in given.items()
        if x is not None
    }


def by_token(named: Mapping[str, Any]) -> list[str]:
    return [name for name, x in named.items() if x.ndim == 3]
