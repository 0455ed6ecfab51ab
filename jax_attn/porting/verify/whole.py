"""Verify the model that models.load returns, for a whole checkpoint or some of its layers."""

import gc
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jax_attn.environment import install_line
from jax_attn.families import Config, model_family
from jax_attn.families.traits import ModelTraits
from jax_attn.parity.judge.finding import findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.torch_settings import one_thread
from jax_attn.porting.verify import cut as cutting
from jax_attn.porting.verify.layer import unmeasured
from jax_attn.porting.verify.model_pair import PART, ModelPair
from jax_attn.porting.verify.source_pair import pair_of
from jax_attn.transfer import TransferError
from jax_attn.translate.pretrained import expect_memory

DTYPES_OF_MODELS = ("float32", "bfloat16")
LAYER_PART = 3 * 2**24
"""Like `PART`, for a single layer; smaller, because layers are verified if memory is short."""

_WHOLE = "the whole model"
_ATTENTION = "--attention verifies only the attention, without transformers"


def verify_whole(path: Path, config: Config, *, explain: bool = False) -> Iterator[Result]:
    """Verify a whole model; yield one result for each of DTYPES_OF_MODELS.

    Without transformers, results are INCONCLUSIVE. explain: add an explanation to a result that
    does not pass. Raises TransferError if the config has no model here, or the file does not fit
    it; MemoryError, before any tensor is read, if memory does not suffice.
    """
    for dtype, name in zip(DTYPES_OF_MODELS, names_of_whole(), strict=True):
        yield _verified(path, config, dtype, name, PART, _WHOLE, explain=explain)


def verify_layers(
    path: Path, config: Config, layers: Sequence[int], *, explain: bool = False
) -> Iterator[Result]:
    """Verify single layers, each cut out of the checkpoint by `cut`; yield a result for each dtype.

    A layer runs between the embedding of the vocabulary's first tokens and the model's last norm
    and head. Raises TransferError, before verifying any, for layers that cannot be cut out.
    """
    if problems := cutting.problems(path, config, layers):
        raise TransferError("layers to verify", problems)
    traits = model_family(config).model_traits(config, layers)
    subject = "each layer alone, between the embedding and the last norm and head,"
    if (count := traits.embedding.vocab_size) > cutting.ROWS:
        subject += f" with the first {cutting.ROWS} of {count} tokens,"
    names = iter(names_of_layers(layers))
    for layer in layers:
        with tempfile.TemporaryDirectory() as temporary:
            folder, small = Path(temporary), config
            if _has_transformers():
                small = cutting.cut(path, config, layer, folder)
            for dtype in DTYPES_OF_MODELS:
                with one_thread():  # makes perturbed runs one by one, which takes half the memory
                    result = _verified(
                        *(folder, small, dtype, next(names), LAYER_PART, subject, traits),
                        explain=explain,
                    )
                yield result


def names_of_whole() -> list[str]:
    """Return the names of the results of `verify_whole`."""
    return [f"model, {dtype}" for dtype in DTYPES_OF_MODELS]


def names_of_layers(layers: Sequence[int]) -> list[str]:
    """Return the names of the results of `verify_layers`."""
    return [f"layer {layer}, {dtype}" for layer in layers for dtype in DTYPES_OF_MODELS]


def _verified(
    path: Path,
    config: Config,
    dtype: str,
    name: str,
    part: int,
    subject: str,
    traits: ModelTraits | None = None,
    *,
    explain: bool,
) -> Result:
    """Verify the model of a folder in one dtype.

    subject: what is verified, as worded in the notes. traits: those of all layers, if the folder
    has only one."""
    if not _has_transformers():
        doubt = f"transformers is not installed: {install_line('hf')}; {_ATTENTION}"
        return unmeasured(name, dtype, doubts=(doubt,))
    gc.collect()  # the previous check's models are in reference cycles
    expect_memory(path, part)
    pair = pair_of(path, config, dtype)
    result = pair.check(part, explain=explain)
    shape = pair.inputs["tokens"].shape
    notes = _notes(pair, subject, traits or pair.traits, shape[1])
    return replace(
        result,
        name=name,
        notes=(*findings("about-checkpoint", notes), *result.notes),
        details={
            "design": model_family(config).name,
            "variant": type(pair.reference).__name__,
            "mask": "padding on either side",
            "shape": "x".join(map(str, shape)),
            "transform": "jit",
        },
    )


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _notes(pair: ModelPair, subject: str, traits: ModelTraits, T: int) -> Iterator[str]:
    """Yield what the verdict covers, in a sentence, and which parts of the file it does not."""
    import transformers

    ways = "by lengths, by a mask" + (", by a cache" if pair.has_cache else "; not by a cache")
    kind = type(pair.reference).__name__
    theirs = f"transformers {transformers.__version__}'s {kind}"
    yield f"verified {subject} against {theirs}: {ways}"
    if beyond := [*_beyond(traits, T)]:
        yield f"rows of {T} tokens are too short for {' and for '.join(beyond)}"
    if pair.left_out:
        yield f"not compared, as {kind} does not have them: {', '.join(pair.left_out)}"


def _beyond(traits: ModelTraits, T: int) -> Iterator[str]:
    """Yield what no row of T tokens exercises."""
    attention = [block.attention for block in (*traits.blocks, *traits.decoder)]
    if windows := [a.window for a in attention if a.window is not None and a.window >= T]:
        yield f"the window of {min(windows)}"
    scalings = [r.scaling for a in attention if (r := a.rotary) is not None and r.stretches]
    lengths = {scaling[1]["original_length"] for scaling in scalings if scaling is not None}
    tables = [a.bias.fields for a in attention if a.bias is not None and a.bias.kind == "relative"]
    if farthest := [t["max_distance"] for t in tables if t["max_distance"] >= T]:
        yield f"the biases of distances up to {max(farthest)}"
    yield from (f"dynamic NTK, which begins after {length}" for length in lengths if length >= T)
