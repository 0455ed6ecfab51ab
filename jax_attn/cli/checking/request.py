"""What `jax-attn check` is asked: it reads the user's file, checks its pair and explains."""

import inspect
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from jax_attn.cli.status import missing
from jax_attn.environment import EXTRAS, install_line
from jax_attn.parity.pair.errors import MissingModuleError, PairError, refusal
from jax_attn.parity.pair.pair import Pair, TrainingPair
from jax_attn.parity.pair.read import called, function, pair_of

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import Result


class Judged(NamedTuple):
    """A result; and Ctrl-C, if it came before the result was explained."""

    result: "Result"
    interrupted: KeyboardInterrupt | None = None


@dataclass(frozen=True)
class Request:
    """One check of a user's pair.

    named: `FILE.py:FUNCTION` or `package.module:FUNCTION`. options: arguments of `parity.check` or
    `parity.check_training` that win over those of the file. training: whether to check a training.
    explain: whether to explain a result that is not PASS. words: the options as they were typed.
    """

    named: str
    options: Mapping[str, Any]
    training: bool = False
    explain: bool = False
    words: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line that asks for this check."""
        return shlex.join(["jax-attn", "check", self.named, *self.words])

    def judged(self) -> "Judged":
        """Read the file, check the pair, and explain the result if that is asked.

        What the user's code prints goes to stderr.

        Raises PairError: the file, or what it makes, cannot be checked. Raises MemoryError.
        """
        with _stdout_is_stderr():
            pair = self._pair()
            try:
                result = replace(_checked(pair), name=self.named)
            except MemoryError:
                raise
            except (Exception, SystemExit) as error:
                if (refused := refusal(error)) is None:
                    raise  # a mistake of this package
                raise refused from error
            if not self.explain:
                return Judged(result)
            try:
                return Judged(result.explained())
            except KeyboardInterrupt as interrupted:
                click.echo("the result is not explained", err=True)
                return Judged(result, interrupted)
            except Exception as error:  # whatever it is, the verdict stands
                why = f"{type(error).__name__}: {error}"
                click.echo(f"the result is not explained: {why}", err=True)
                return Judged(result)

    def _pair(self) -> Pair | TrainingPair:
        dtype = self.options.get("dtype")
        if dtype == "float64":
            import jax

            jax.config.update("jax_enable_x64", True)  # before the port is built
        make = function(self.named)
        takes_dtype = dtype and "dtype" in inspect.signature(make).parameters
        made = called(self.named, make, **({"dtype": dtype} if takes_dtype else {}))
        pair = pair_of(self.named, made)
        if self.training is not isinstance(pair, TrainingPair):
            kinds = "a Pair", "a TrainingPair"
            expected, got = reversed(kinds) if self.training else kinds
            mend = "without" if self.training else "with"
            raise PairError(
                f"{self.named}: expected {expected}, got {got}; check it {mend} --training"
            )
        return replace(pair, **self.options)


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
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
    of_extras = {module: extra for extra, (module, _) in EXTRAS.items()}
    if extra := of_extras.get(error.name):
        missing(f"{error}\n{error.name} is not installed: {install_line(extra)}")
    missing(
        f"{error}\nno module is named {error.name}: install the package that provides it or, if "
        "it is a file of yours, put it into the same folder"
    )
