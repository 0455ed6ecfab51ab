"""A golden reference: what judging reads of a reference, as plain arrays and words.

`prepare` makes one where torch is; it can be saved, and loaded where torch is not.
"""

import copy
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import click

from jax_attn.parity.checking.by_convention import Convention
from jax_attn.parity.checking.digests import Digest, Digests
from jax_attn.parity.checking.other_inputs import OtherInputs, OtherIntegers
from jax_attn.parity.checking.probes import QUESTIONS_ASKED
from jax_attn.parity.checking.reference_side import TAPS, NotAskedError, ReferenceSide
from jax_attn.parity.checking.weights import Weights
from jax_attn.parity.golden.codec import TreeEncoder, decode
from jax_attn.parity.golden.folder import FolderContents, expect_new, read
from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, Run

LARGE = 10**9
"""Bytes beyond which a golden reference is written only after a yes."""


@dataclass(frozen=True, eq=False, repr=False)
class Golden(ReferenceSide):
    """A reference that was prepared: `check` judges ports by it, with neither module nor torch.

    It holds inputs, cotangents, the oracle's numbers, budgets, torch's own results, and what probes
    found. It holds no weights, only their names, shapes and digests.

    Attributes:
      dtype: the dtype of both modules.
      gradients: whether gradients are compared.
      seed: the seed of the cotangents.
      inputs: the inputs of both sides.
      parameters: the names of the parameters whose gradients are compared; None stands for all.
      captured: the versions of the packages that it was prepared with, by name.
    """

    dtype: str
    gradients: bool
    seed: int
    as_jax: bool
    inputs: Inputs
    parameters: frozenset[str] | None
    differentiated: Arrays
    own: Run
    exact: Run
    budgets: Mapping[str, Mapping[str, Budget]]
    inference: Arrays = field(default_factory=dict)
    unnested: Arrays = field(default_factory=dict)
    nested_encoder: str = ""
    buffers: Arrays = field(default_factory=dict)
    remembers: bool = False
    padding_rows: Mapping[str, int] = field(default_factory=dict)
    near_decisions: tuple[str, ...] = ()
    near_sides: tuple[str, ...] = ()
    has_gradient: bool = True
    narrowing_casts: tuple[str, ...] = ()
    answers: Mapping[str, Any] = field(default_factory=dict)
    again: "Golden | None" = None
    captured: Mapping[str, str] = field(default_factory=dict)

    precision, declared_nan = None, MappingProxyType({})

    def __post_init__(self) -> None:
        if self.again is not None:
            again = copy.copy(self.again)
            vars(again)["first"] = self
            vars(self)["again"] = again

    @cached_property
    def first(self) -> Self:
        """The one whose `again` this is, else this one; only its digest is a folder's."""
        return self

    def __repr__(self) -> str:
        return f"<Golden: {self.dtype}, {self.size:,} bytes, digest {self.digest}>"

    @classmethod
    def of(cls, side: ReferenceSide, captured: Mapping[str, str]) -> Self:
        """Compute every number that judging any port may need of a reference, and hold it."""
        # In this order: runs for another budget find other decisions that lie near.
        part = cls._compared(side)
        whole = {name: getattr(side, name) for name in _OF_THE_WHOLE}
        answers = {name: cls._plain(side, side.answer(name)) for name in QUESTIONS_ASKED}
        again = None if side.again is None else cls.of(side.again, {})
        return replace(part, **whole, answers=answers, again=again, captured=captured)

    @classmethod
    def _compared(cls, side: ReferenceSide) -> Self:
        """Return what a comparison with the reference reads, without what probes ask."""
        return cls(**{name: getattr(side, name) for name in _OF_A_PART})

    @classmethod
    def _plain(cls, asked: ReferenceSide, answer: Any) -> Any:
        """Return an answer without tensors and references."""

        def compared(side: ReferenceSide) -> Golden:
            part = cls._compared(side)
            if asked.first is asked or side.again is None:
                return part
            return replace(part, again=cls._compared(side.again))

        if isinstance(answer, Weights):
            return replace(answer, state=Digests.of(answer.state))
        if isinstance(answer, OtherIntegers):
            together = None if answer.together is None else compared(answer.together)
            each = {name: compared(side) for name, side in answer.each.items()}
            return OtherIntegers(answer.notes, together, each)
        return answer

    def answer(self, question: str) -> Any:
        if question not in self.answers:
            raise NotAskedError(f"the golden reference {self.first.digest[:12]}")
        return self.answers[question]

    @property
    def notes(self) -> tuple[Finding, ...]:
        """A note on what a check by this reference cannot tell."""
        versions = [f"{name} {self.captured[name]}" for name in _TOLD if name in self.captured]
        made = f", captured with {joined(versions)}" if versions else ""
        explains = _CAUSES if TAPS in self.answers else "for an explanation"
        note = (
            f"judged by the golden reference {self.digest[:12]}{made}: it has "
            "only digests of the weights, which do not tell in which elements they differ; "
            f"{explains}, call parity.explain(reference, port, inputs, …), or run jax-attn check "
            "FILE.py:FUNCTION --explain, where the reference is"
        )
        return (StandingNote("golden-reference", note),)

    @cached_property
    def _contents(self) -> FolderContents:
        encoder = TreeEncoder(TYPES)
        return FolderContents.of(encoder.encode(self), encoder.arrays)

    @property
    def digest(self) -> str:
        """The SHA-256 of everything that it holds, by which `load_golden` can insist on it."""
        return self._contents.digest

    @property
    def size(self) -> int:
        """The bytes that `save` writes."""
        return self._contents.size

    def save(self, folder: str | os.PathLike[str], *, yes: bool = False) -> str:
        """Write the reference to a new folder: whole, or not at all.

        stderr shows the size before it is written, and then the digest. With gradients, it takes 16
        to 20 bytes for each parameter, and 8 more for each convention on which its gradient
        depends, such as the derivative of ReLU at 0.

        Args:
          folder: the name of the folder. It must not exist.
          yes: write more than 1 GB without asking. Where nobody can be asked, it is refused.

        Returns:
          The digest, for `load_golden(folder, expect_digest=…)`.

        Raises:
          ValueError: it is larger than 1 GB, and nobody said yes.
          TransferError: the folder exists, or the disk refuses.
        """
        target = Path(folder)
        expect_new(target)
        print(f"{target}: {self.size:,} bytes", file=sys.stderr, flush=True)
        if self.size > LARGE and not (yes or _asked()):
            raise ValueError(
                f"save: expected a yes to {self.size:,} bytes, more than {LARGE:,}, got none; pass "
                "yes=True, or prepare fewer gradients with parameters="
            )
        self._contents.write(target)
        print(f"{target}: digest {self.digest}", file=sys.stderr, flush=True)
        return self.digest


def _asked() -> bool:
    """Ask on the terminal; return False if there is none."""
    try:
        return sys.stdin.isatty() and click.confirm("write them?", err=True)
    except click.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error  # click makes one of Ctrl-C, too
        return False  # the end of the terminal's input


_OF_A_PART = (
    *("dtype", "gradients", "seed", "as_jax", "inputs", "parameters", "differentiated"),
    *("own", "exact", "budgets"),
)
_OF_THE_WHOLE = (
    *("inference", "unnested", "nested_encoder", "buffers", "remembers", "padding_rows"),
    *("near_decisions", "near_sides", "has_gradient", "narrowing_casts"),
)
_TOLD = ("torch", "jax-attn")
_CAUSES = "its taps tell where a port first goes wrong; for the cause"

TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Golden, Inputs, Run, Budget, Findings, Weights, Digests, Digest),
        *(Convention, OtherIntegers, OtherInputs),
    )
}
"""The types that a golden reference is made of; their names and fields are the format."""


def load_golden(folder: str | os.PathLike[str], *, expect_digest: str | None = None) -> Golden:
    """Read a golden reference that `Golden.save` wrote; this needs no torch.

    Args:
      folder: the folder.
      expect_digest: the digest that `save` returned, 64 hexadecimal digits in either case. Any
        other reference is refused, so that nobody captures one anew until a port passes.

    Returns:
      The `Golden`, equal bit for bit to the one that was saved.

    Raises:
      ValueError: the folder is missing, unreadable, incomplete, truncated or changed, has another
        digest, or was written in a newer format; or `expect_digest` is none. The message says
        which, and what to do.
    """
    return decoded(Path(folder), read(Path(folder), expect_digest))


def decoded(folder: Path, contents: FolderContents) -> Golden:
    """Return the golden reference that a folder holds. Raises ValueError if it holds another."""
    try:
        golden = decode(contents.document["content"], contents.arrays, TYPES)
        if not isinstance(golden, Golden):
            raise TypeError(f"got {type(golden).__name__}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: expected a golden reference, got {error!r}") from error
    vars(golden)["_contents"] = contents  # those of an older format keep their digest
    return golden
