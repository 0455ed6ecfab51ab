"""The steps of `jax-attn translate`: read a reference, translate it, prove it, write the folder."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_attn.cli.checking.request import Judged, explained, refusals
from jax_attn.cli.verifying.checkpoint import expect_torch_side
from jax_attn.parity.pair.errors import PairError
from jax_attn.parity.pair.pair import Pair
from jax_attn.parity.pair.read import made
from jax_attn.transfer.files.local import download_hint

if TYPE_CHECKING:
    import torch

    from jax_attn.parity.judge.result import Result
    from jax_attn.translate.checkpoint import AnySize
    from jax_attn.translate.tracing.problems import Unsupported

Axes = dict[str, dict[int, str]]

_GIVEN = ("reference", "port", "inputs", "dtype", "transforms")
"""The arguments of a Pair that go with a translation: its port is None, its dtype float32."""


def is_checkpoint(named: str) -> bool:
    """Return whether an argument names a checkpoint, in place of a function in a file."""
    if os.path.isdir(named) or download_hint(Path(named)):
        return True
    return ":" not in named and not named.endswith(".py")


@dataclass(frozen=True)
class TranslateJob:
    """One translation of a user's module, or of the model of a checkpoint.

    named: the function, or the folder. part: the module of a checkpoint's model. dynamic: the axes
    that vary; for a checkpoint, none means all that can. partial: whether operators without a rule
    raise in the file, in place of being refused.
    """

    named: str
    out: Path
    dynamic: Axes
    part: str | None = None
    partial: bool = False

    def done(self) -> "Judged | tuple[Unsupported, ...]":
        """Translate, prove, explain and write; return the result of the check.

        A partial translation that lacks something is written without a check; then all that it
        lacks is returned.

        Raises PairError for a file or module that cannot be translated, TransferError if a
        checkpoint cannot be read or the folder cannot be written, and MemoryError.
        """
        from jax_attn.parity.judge.finding import findings
        from jax_attn.translate.folder import expect_new, write
        from jax_attn.translate.proof import loaded, prove

        expect_new(self.out)
        module, inputs, notes = self._read()
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        with refusals(), _refused_by_torch(self.named):
            varied = self._translated(module, inputs)
        translation, sizes = varied.translation, varied.dynamic
        with refusals():
            port = loaded(translation, module)
        if missing := translation.unsupported:
            write(self.out, translation, port, inputs, None, reference=kind, sizes=sizes)
            return missing
        with refusals():
            result = prove(translation, module, inputs, dynamic=sizes or None, port=port)
            about = findings("about-checkpoint", (*notes, *varied.notes))
            named = replace(result, name=self.named, notes=(*about, *result.notes))
            judged = explained(named)
        write(
            self.out,
            translation,
            port,
            inputs,
            judged.result,
            reference=kind,
            sizes=sizes,
            files={"report.md": _report(judged.result)},
        )
        return judged

    def _read(self) -> "tuple[torch.nn.Module, Any, tuple[str, ...]]":
        """Return what is translated, its inputs, and notes on what of it is left out."""
        if not is_checkpoint(self.named):
            return *given(self.named, made(self.named, None)), ()
        from jax_attn.translate.checkpoint import model_of

        expect_torch_side(Path(self.named))
        return model_of(Path(self.named), self.part)

    def _translated(self, module: "torch.nn.Module", inputs: Any) -> "AnySize":
        from jax_attn.translate.checkpoint import AnySize, translate_any_size
        from jax_attn.translate.translation import translate

        if is_checkpoint(self.named) and not self.dynamic:
            return translate_any_size(module, inputs, partial=self.partial)
        dynamic = self.dynamic or None
        translation = translate(module, inputs, dynamic=dynamic, partial=self.partial)
        return AnySize(translation, self.dynamic)


def given(named: str, result: Any) -> tuple[Any, Any]:
    """Return the module and its inputs, of what a function returned. Raises PairError."""
    expected = "expected (torch module, inputs) or a parity.Pair whose port is None"
    if isinstance(result, Pair):
        nothing: Any = None
        plain = Pair(nothing, None, nothing)
        others = [
            f.name
            for f in fields(Pair)
            if f.name not in _GIVEN and getattr(result, f.name) != getattr(plain, f.name)
        ]
        problems = [] if result.port is None else [f"{named}: port: expected None, got a port"]
        if others:
            problems.append(f"{named}: a translation takes no {', '.join(others)}; leave them out")
        if problems:
            raise PairError("\n".join(problems))
        result = result.reference, result.inputs
    if not (isinstance(result, tuple) and len(result) == 2):
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise PairError(f"{named}: {expected}, got {got}")
    reference, inputs = result
    if not isinstance(inputs, tuple | dict):
        raise PairError(
            f"{named}: inputs: expected a tuple or a dict of arrays, got {type(inputs).__name__}"
        )
    return reference, inputs


@contextmanager
def _refused_by_torch(named: str) -> Iterator[None]:
    """Turn what torch.export says of a module into a PairError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PairError) or not _is_of_torch(error):
            raise
        raise PairError(f"{named}: torch.export refuses it: {error}") from error


def _is_of_torch(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "torch" in Path(frames[-1].filename).parts


def _report(result: "Result") -> str:
    from jax_attn.environment import describe
    from jax_attn.report.documents import as_markdown

    return as_markdown([result], describe())
