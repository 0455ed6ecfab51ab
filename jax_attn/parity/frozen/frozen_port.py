"""A port in another process, as judging asks it. Every answer is checked before it is used."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jax_attn.parity.frozen.port_side import PortProcess
from jax_attn.parity.frozen.table_words import layout_of
from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.run import TRANSFORMS
from jax_attn.parity.run.asked_port import PINNED, PortFacts
from jax_attn.parity.run.inputs_and_runs import (
    Arrays,
    Inputs,
    RaisedError,
    Run,
    float_dtype,
    holds,
    is_float,
)
from jax_attn.transfer import Layout, Problem, TransferError
from jax_attn.transfer.problems import printable

_JAX_PART = {"devices": tuple, "jax_default_matmul_precision": str, "jax_enable_x64": bool}
"""The keys of `environment.of_jax`, and their types in an answer."""


class Made(NamedTuple):
    """The port that a user's file made. jax_part: `environment.of_jax` of its process."""

    transforms: tuple[str, ...]
    strict: bool
    layout: Layout | None
    facts: PortFacts
    platform: str
    jax_part: dict[str, Any]


def made(process: PortProcess, options: Mapping[str, Any], given: Mapping[str, Any]) -> Made:
    """Let the process make the port. Raises PairError if it cannot be judged.

    given: the fields of `Unanswered`.
    """
    answer = process.ask("make", process.named, options, given)
    try:
        transforms, strict, table, facts, platform, jax_part = answer
        layout = None if table is None else layout_of(table)
        is_right = (
            *(_are_words(transforms, tuple), {*transforms} <= {*TRANSFORMS}, len(transforms) > 0),
            *(isinstance(strict, bool), isinstance(facts, PortFacts), _is_word(platform)),
            *(isinstance(facts.is_on_mesh, bool), isinstance(facts.is_cut, bool)),
            *(
                _are_words(paths, frozenset)
                for paths in (facts.drawn, facts.caches, facts.narrow_rows)
            ),
            *(isinstance(jax_part.get(name), kind) for name, kind in _JAX_PART.items()),
            *(jax_part.keys() == _JAX_PART.keys(), _are_words(jax_part["devices"])),
        )
    except Exception as error:  # whatever the process wrote
        raise process.wrong("what the file made", answer) from error
    if not all(is_right) or not _is_printable(table):
        raise process.wrong("what the file made", answer)
    jax_part = {**jax_part, "devices": [*jax_part["devices"]]}
    return Made(transforms, strict, layout, facts, platform, jax_part)


@dataclass(frozen=True)
class FrozenPort:
    """A port that runs in another process. is_alone: whether on one device of its mesh."""

    process: PortProcess
    made: Made
    is_alone: bool = False
    _is_full: list[bool] = field(default_factory=lambda: [True])

    @property
    def facts(self) -> PortFacts:
        return self.made.facts

    @contextlib.contextmanager
    def full_precision(self, wanted: bool) -> Iterator[tuple[str, tuple[StandingNote, ...]]]:
        platform = self.made.platform
        before, self._is_full[0] = self._is_full[0], wanted
        try:
            yield platform, (PINNED,) if wanted and platform != "cpu" else ()
        finally:
            self._is_full[0] = before

    def run(self, dtype: str, cotangents: Arrays, transform: str) -> Run:
        answer = self._ask("run", dtype, cotangents, transform)
        match answer:
            case (str(words), str(message), str(module)):
                line = printable(" ".join(words.split()))
                raise RaisedError(line) from self.process.refusal(message, module)
        return self._run(dtype, answer)

    def tried(self, dtype: str, inputs: Inputs, transform: str) -> Run | str:
        answer = self._ask("tried", dtype, inputs, transform)
        return answer if _is_word(answer) else self._run(dtype, answer)

    def computed_in(self) -> Mapping[str, int]:
        answer = self.process.ask("computed_in", self.is_alone)
        dtypes = answer.items() if isinstance(answer, Mapping) else [("", 0)]
        if not all(_is_float(name) and isinstance(n, int) and n > 0 for name, n in dtypes):
            raise self.process.wrong("numbers of results by dtype", answer)
        return answer

    def held(self, paths: Collection[str]) -> Arrays:
        return _arrays(self.process, self.process.ask("held", frozenset(paths)), paths)

    def on_one_device(self) -> "FrozenPort | None":
        return replace(self, is_alone=True) if self.facts.is_on_mesh else None

    def notes_on_mesh(self) -> tuple[Finding, ...]:
        """Return the notes on what its programs send between devices, and what each holds."""
        answer = self.process.ask("on_mesh")
        kinds = ("equal-shares", "traffic", "gradient-replicated")
        notes = answer if isinstance(answer, tuple) else (None,)
        if not all(isinstance(n, Finding) and n.kind in kinds and _is_word(n) for n in notes):
            raise self.process.wrong("notes on its mesh", answer)
        return notes

    def files(self) -> tuple[str, ...]:
        """Return the names of the user's files that are imported."""
        answer = self.process.ask("files")
        if not isinstance(answer, tuple) or not all(isinstance(name, str) for name in answer):
            raise self.process.wrong("names of files", answer)
        return answer

    def _ask(self, question: str, *args: Any) -> Any:
        return self.process.ask(question, self.is_alone, self._is_full[0], *args)

    def _run(self, dtype: str, answer: Any) -> Run:
        """Return the answer if it is a run with outputs of this dtype. Raises PairError."""
        if not isinstance(answer, Run) or not _are_words(answer.unlike):
            raise self.process.wrong("a run", answer)
        parts = (answer.outputs, answer.input_grads, answer.parameter_grads)
        for named in (*parts, answer.left, answer.second):
            _arrays(self.process, named)
        for outputs in (answer.outputs, answer.second):
            floats = [a.dtype for a in outputs.values() if is_float(a.dtype)]
            if others := [held.name for held in floats if not holds(held, dtype)]:
                raise self.process.wrong(f"outputs that hold {dtype}", others)
        return answer


@dataclass(frozen=True)
class FrozenWeights:
    """The weights of a port in another process, and its table without what the steps compute."""

    process: PortProcess
    layout: Layout

    @property
    def arrays(self) -> Arrays:
        return self._carried[0]

    @property
    def parameters(self) -> frozenset[str]:
        return self._carried[1]

    def to_torch(self, arrays: Arrays) -> Arrays:
        answer = self.process.ask("to_torch", arrays)
        match answer:
            case (str(doing), problems) if doing.isprintable() and problems:
                raise TransferError(doing, self._problems(problems))
        return _arrays(self.process, answer)

    def _problems(self, answer: Any) -> tuple[Problem, ...]:
        try:
            problems = tuple(Problem(*fields) for fields in answer)
        except TypeError as error:
            raise self.process.wrong("the problems of its table", answer) from error
        if not all(map(_are_words, problems)):
            raise self.process.wrong("the problems of its table", answer)
        return problems

    def misfits(self, state: Arrays) -> tuple[Problem, ...]:
        return self._problems(self.process.ask("misfits"))

    @cached_property
    def _carried(self) -> tuple[Arrays, frozenset[str]]:
        match self.process.ask("weights"):
            case (arrays, frozenset(paths)):
                return _arrays(self.process, arrays), paths
            case answer:
                raise self.process.wrong("its weights", answer)


def _arrays(process: PortProcess, answer: Any, names: Collection[str] | None = None) -> Arrays:
    """Return the answer if it is arrays by name. Raises PairError.

    names: the names that it must have; None allows any.
    """
    if not isinstance(answer, Mapping):
        raise process.wrong("arrays by name", answer)
    wrong = [k for k, a in answer.items() if not (_is_word(k) and isinstance(a, np.ndarray))]
    if wrong or (names is not None and answer.keys() != {*names}):
        raise process.wrong("arrays by name", answer)
    return answer


def _is_float(name: Any) -> bool:
    """Return whether this is the name of a floating-point dtype."""
    try:
        return _is_word(name) and is_float(float_dtype(name))
    except (AssertionError, TypeError):
        return False


def _is_word(value: Any) -> bool:
    """Return whether this is a line of text, which begins no line of a report."""
    return isinstance(value, str) and value.isprintable()


def _are_words(values: Any, kind: Any = tuple | frozenset) -> bool:
    return isinstance(values, kind) and all(map(_is_word, values))


def _is_printable(words: Any) -> bool:
    """Return whether nested tuples hold only lines of text, booleans and None."""
    if isinstance(words, tuple):
        return all(map(_is_printable, words))
    return words is None or isinstance(words, bool) or _is_word(words)
