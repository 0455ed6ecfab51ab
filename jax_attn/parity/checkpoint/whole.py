"""A whole checkpoint, or some of its layers: the verdicts on the model that models.load gives."""

import importlib.util
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jax_attn.environment import free_memory
from jax_attn.parity.checkpoint.cut import cut
from jax_attn.parity.checkpoint.layer import unmeasured
from jax_attn.parity.checkpoint.pair import PART, Pair
from jax_attn.parity.judge.result import Result
from jax_attn.transfer import load_checkpoint
from jax_attn.transfer.arrays import specs
from jax_attn.transfer.families import Config, model_family

DTYPES_OF_MODELS = ("float32", "bfloat16")
LAYER_PART = 3 * 2**24
"""Likewise as `PART`, of a single layer, which is verified where memory is short."""
_BYTES, _BYTES_COMPARED = 28, 47
"""A parameter takes as many bytes: on both sides, and as far as its gradient is compared."""

_HF = 'transformers is not installed: pip install "jax-attn[hf]"'
_ATTENTION = "verify the attention alone, which needs none, with --attention"


def verify_whole(path: Path, config: Config, *, explain: bool = False) -> Iterator[Result]:
    """The verdicts on a whole model, one for each of DTYPES_OF_MODELS.

    INCONCLUSIVE without transformers. explain: whether a result that does not pass has its
    explanation. Raises TransferError where there is no model of the config, or its file does not
    fit; MemoryError, before anything is read, where memory does not suffice.
    """
    for dtype, name in zip(DTYPES_OF_MODELS, names_of_whole(), strict=True):
        yield _verified(path, config, dtype, name, PART, explain=explain)


def verify_layers(
    path: Path, config: Config, layers: Sequence[int], *, explain: bool = False
) -> Iterator[Result]:
    """Likewise on some layers of a model, each read on its own, as `cut` cuts them out.

    A layer is between the embedding of the first tokens of the vocabulary and the model's last norm
    and head.
    """
    names = iter(names_of_layers(layers))
    for layer in layers:
        with tempfile.TemporaryDirectory() as folder:
            small = cut(path, config, layer, Path(folder))
            for dtype in DTYPES_OF_MODELS:
                result = _verified(
                    Path(folder), small, dtype, next(names), LAYER_PART, explain=explain
                )
                scope = f"of layer {layer} alone, between the embedding and the last norm and head"
                yield replace(result, notes=(scope, *result.notes))


def names_of_whole() -> list[str]:
    """The names of the results of `verify_whole`."""
    return [f"model, {dtype}" for dtype in DTYPES_OF_MODELS]


def names_of_layers(layers: Sequence[int]) -> list[str]:
    """The names of the results of `verify_layers`."""
    return [f"layer {layer}, {dtype}" for layer in layers for dtype in DTYPES_OF_MODELS]


def _verified(
    path: Path, config: Config, dtype: str, name: str, part: int, *, explain: bool
) -> Result:
    if importlib.util.find_spec("transformers") is None:
        return unmeasured(name, dtype, doubts=(f"{_HF}; {_ATTENTION}",))
    _expect_memory(path, part)
    pair = Pair.of(path, config, dtype)
    result = pair.check(part, explain=explain)
    T = pair.inputs["tokens"].shape[1]
    return replace(
        result,
        name=name,
        notes=(_scope(pair), *_left_out(pair), *result.notes),
        details={
            "design": model_family(config).name,
            "variant": type(pair.reference).__name__,
            "mask": "padding on either side",
            "shape": f"3x{T}",
            "transform": "jit",
        },
    )


def _expect_memory(path: Path, part: int) -> None:
    """Raises MemoryError where a check of a file's model would need more than there is."""
    with load_checkpoint(path) as tensors:
        count, free = sum(math.prod(s.shape) for s in specs(tensors)[0].values()), free_memory()
    needed = _BYTES * count + _BYTES_COMPARED * min(count, part)
    if free is not None and needed > free:
        have = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        raise MemoryError(f"a check of the whole model takes about {have}")


def _left_out(pair: Pair) -> tuple[str, ...]:
    if not pair.left_out:
        return ()
    kind = type(pair.reference).__name__
    return (f"not compared, as {kind} does not have them: {', '.join(pair.left_out)}",)


def _scope(pair: Pair) -> str:
    """What the verdict is about, in a sentence."""
    import transformers

    T = pair.inputs["tokens"].shape[1]
    windows = [w for b in pair.traits.blocks if (w := b.attention.window) is not None and w >= T]
    beyond = f"; rows of {T} are too short for the window of {min(windows)}" if windows else ""
    ways = "by lengths, by a mask" + (", by a cache" if pair.has_cache else "; not by a cache")
    return (
        f"verified the whole model, {len(pair.traits.blocks)} layers, against transformers "
        f"{transformers.__version__}'s {type(pair.reference).__name__}: {ways}{beyond}"
    )
