"""Run a request of `jax-attn check`: read the user's file, check its pair and explain."""

import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from jax_attn.cli.status import WrongInput, missing
from jax_attn.environment import EXTRAS, install_line
from jax_attn.parity.pair.errors import MissingModuleError, PairError, refusal
from jax_attn.parity.pair.pair import FIXED, Pair, TrainingPair
from jax_attn.parity.pair.read import made, pair_of, port_of

if TYPE_CHECKING:
    from jax_attn.parity.golden.golden import Golden
    from jax_attn.parity.judge.result import Result


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error of the user's code, or one that refuses arguments, into a PairError."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError, PairError):
        raise
    except BaseException as error:  # pytest's outcomes, for one, are no Exception
        if (refused := refusal(error)) is None:
            raise  # a mistake of this package
        raise refused from error


class Judged(NamedTuple):
    """A result; and Ctrl-C, if it came before the result was explained.

    jax_part, files: of a port in a process of its own, that process's `environment.of_jax`, and the
    user's files that it imported.
    """

    result: "Result"
    interrupted: KeyboardInterrupt | None = None
    jax_part: dict[str, Any] | None = None
    files: frozenset[Path] = frozenset()


TIMEOUT = 1800


def explained(result: "Result") -> Judged:
    """Explain a result that is not PASS; whatever goes wrong then, the verdict stands."""
    try:
        return Judged(result.explained())
    except KeyboardInterrupt as interrupted:
        click.echo("the result is not explained", err=True)
        return Judged(result, interrupted)
    except BaseException as error:
        click.echo(f"the result is not explained: {type(error).__name__}: {error}", err=True)
        return Judged(result)


@dataclass(frozen=True)
class Request:
    """One check of a user's pair.

    named: `FILE.py:FUNCTION` or `package.module:FUNCTION`. options: arguments of `parity.check` or
    `parity.check_training` that win over those of the file. training: whether to check a training.
    explain: whether to explain a result that is not PASS. words: the options as they were typed.
    golden: the folder of a golden reference that judges the port. expect_digest: its digest, with
    which the file runs in a process of its own. timeout: the seconds that its answers may take.
    """

    named: str
    options: Mapping[str, Any]
    training: bool = False
    explain: bool = False
    words: tuple[str, ...] = ()
    golden: Path | None = None
    expect_digest: str | None = None
    timeout: int = TIMEOUT

    @property
    def command(self) -> str:
        """The command line that asks for this check."""
        return shlex.join(["jax-attn", "check", self.named, *self.words])

    def judged(self) -> "Judged":
        """Read the file, check the pair, and explain the result if that is asked.

        What the user's code prints goes to stderr.

        Raises PairError: the file, or what it makes, cannot be checked. Raises MemoryError.
        """
        if self.golden is not None and self.expect_digest is not None:
            return self._judged_frozen(self.golden, self.expect_digest)
        with stdout_is_stderr():
            with refusals():
                golden = self._golden()
            pair = self.pair(golden)
            with refusals():
                if golden is not None and isinstance(pair, Pair):
                    result = _checked_by(golden, pair)
                else:
                    result = _checked(pair)
            result = replace(result, name=self.named)
            return explained(result) if self.explain else Judged(result)

    def _golden(self) -> "Golden | None":
        if self.golden is None:
            return None
        from jax_attn.parity.checking.reference_side import TAPS
        from jax_attn.parity.golden.golden import load_golden

        golden = load_golden(self.golden)
        if self.explain and TAPS not in golden.answers:
            raise PairError(
                f"--explain: {self.golden} does not hold the reference's tensors; capture it with "
                "--taps, or run jax-attn check FILE.py:FUNCTION --explain where the reference is"
            )
        return golden

    def _judged_frozen(self, golden: Path, digest: str) -> "Judged":
        from jax_attn.parity.frozen.check_frozen import check_frozen

        with refusals():
            frozen = check_frozen(self.named, golden, digest, self.options, self.timeout)
        result = replace(frozen.result, name=self.named)
        return Judged(result, jax_part=frozen.jax_part, files=frozen.files)

    def pair(self, golden: "Golden | None" = None) -> Pair | TrainingPair:
        """Read the file, and return the pair with the options in place. Raises PairError.

        golden: the golden reference by which only the port of the pair is judged.
        """
        dtype = self.options.get("dtype", None if golden is None else golden.dtype)
        result = made(self.named, dtype)
        pair = pair_of(self.named, result) if golden is None else port_of(self.named, result)
        if self.training is not isinstance(pair, TrainingPair):
            kinds = "a Pair", "a TrainingPair"
            expected, got = reversed(kinds) if self.training else kinds
            mend = "without" if self.training else "with"
            raise PairError(
                f"{self.named}: expected {expected}, got {got}; check it {mend} --training"
            )
        return replace(pair, **self.options)


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Send to stderr what is printed in this context, by Python or by the processes it starts."""
    sys.stdout.flush()
    with ExitStack() as stack, redirect_stdout(sys.stderr):
        with suppress(OSError):  # one of the two may be closed
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
        yield


def _checked(pair: Pair | TrainingPair) -> "Result":
    if isinstance(pair, TrainingPair):
        from jax_attn.training.check_training import check_training

        return check_training(pair.reference, pair.port, pair.batches, **pair.options)
    from jax_attn.parity.checking.check import check

    return check(pair.reference, pair.port, pair.inputs, **pair.options)


_FREE = ("layout", "port_call", "transforms", "strict", "mesh", "specs")


def _checked_by(golden: "Golden", pair: Pair) -> "Result":
    """Judge the port of a pair by a golden reference, whose own call stands for the pair's.

    What else the pair says of the reference must be what the golden reference was captured with.
    """
    from jax_attn.parity.checking.check import check

    free = {name: getattr(pair, name) for name in _FREE}
    fixed = {name: getattr(pair, name) for name in FIXED if name != "reference_call"}
    return check(golden, pair.port, **free, **fixed)


def problems_of_options(training: bool, given: Mapping[str, str]) -> list[str]:
    """Return why options cannot be combined with the kind of check. given: field -> option."""
    kind, other = (TrainingPair, "without") if training else (Pair, "with")
    known = {field.name for field in fields(kind)}
    return [
        f"{option}: goes {other} --training"
        for field, option in given.items()
        if field not in known
    ]


def leave_for_missing(error: MissingModuleError) -> NoReturn:
    """Exit because a file imports a package that is not installed."""
    if error.name == "tensorflow" and _is_keras_own(error):
        missing(
            f"{error}\nKeras imports tensorflow, its default backend; set KERAS_BACKEND=jax before "
            "keras is imported, in the environment or in the file"
        )
    of_extras = {module: extra for extra, (module, _) in EXTRAS.items()}
    if extra := of_extras.get(error.name):
        missing(f"{error}\n{error.name} is not installed: {install_line(extra)}")
    missing(
        f"{error}\nno module is named {error.name}: install the package that provides it or, if "
        "it is a file of yours, put it into the same folder"
    )


def _is_keras_own(error: MissingModuleError) -> bool:
    """Return whether it is Keras that imports the missing package."""
    origin = error.__cause__
    frames = traceback.extract_tb(None if origin is None else origin.__traceback__)
    return bool(frames) and "keras" in Path(frames[-1].filename).parts


def refuse(error: PairError | MemoryError) -> NoReturn:
    """Exit because a pair cannot be checked."""
    if isinstance(error, MissingModuleError):
        leave_for_missing(error)
    if isinstance(error, MemoryError):
        missing(f"{error}; --parameters and --no-gradients need less")
    raise WrongInput(str(error)) from error
