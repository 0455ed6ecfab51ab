"""The process of a port: it runs the user's file, and answers questions about the port.

It reads questions from a socket, and writes the answers to it. It receives no answers of the
reference.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from jax_attn.environment import of_jax
from jax_attn.parity.checking.arguments import port_problems, x64_problems
from jax_attn.parity.checking.check import port_on
from jax_attn.parity.checking.fixed import Problems, expect_none, fixed_problems
from jax_attn.parity.checking.on_mesh import notes_on_mesh
from jax_attn.parity.checking.port_weights import HeldWeights
from jax_attn.parity.frozen.messages import MessageError, receive, send
from jax_attn.parity.frozen.table_words import words_of
from jax_attn.parity.frozen.unanswered import Unanswered
from jax_attn.parity.pair.errors import MissingModuleError, PairError, is_users, refusal
from jax_attn.parity.pair.pair import Pair
from jax_attn.parity.pair.read import made, port_of
from jax_attn.parity.run.ahead import compiled_ahead
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, RaisedError, Run
from jax_attn.parity.run.port import Port, full_precision
from jax_attn.transfer import TransferError


class Answering:
    """A port, and its answers. A question is the name of a method with its arguments."""

    def __init__(self, until_the_end: ExitStack) -> None:
        self._until_the_end = until_the_end
        self._sides: dict[bool, Port] = {}
        self._weights: HeldWeights | None = None

    def read(self, named: str, dtype: str) -> Any:
        """Return what the user's file makes."""
        return made(named, dtype)

    def make(self, named: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """Read the file, and refuse what cannot be judged; the options win over the file's."""
        side = Unanswered(**given)
        pair = port_of(named, self.read(named, options.get("dtype", side.dtype)))
        if not isinstance(pair, Pair):
            raise PairError(f"{named}: expected a port or a Pair, got a TrainingPair")
        pair = replace(pair, **options)
        on_mesh = pair.mesh, pair.specs
        fixed = (pair.inputs, pair.dtype, pair.gradients, pair.seed, None, pair.parameters)
        expect_none(
            fixed_problems(side, *fixed),
            Problems([], x64_problems(side.dtype)),
            port_problems(
                pair.port, pair.layout, pair.transforms, pair.strict, pair.port_call, on_mesh
            ),
        )
        port = port_on(side.inputs, pair.port, pair.port_call, *on_mesh)
        self._sides = {False: port, True: port.on_one_device() or port}
        self._side = side
        ahead = compiled_ahead(port, side.dtype, side.differentiated, pair.transforms)
        self._until_the_end.enter_context(ahead)
        if pair.layout is not None:
            self._weights = HeldWeights(port.module, pair.layout)
        with full_precision() as (platform, _):
            jax_part = {k: tuple(v) if k == "devices" else v for k, v in of_jax().items()}
        table = None if pair.layout is None else words_of(pair.layout)
        return tuple(pair.transforms), bool(pair.strict), table, port.facts, platform, jax_part

    def run(
        self, is_alone: bool, is_full: bool, dtype: str, cotangents: Arrays, transform: str
    ) -> Run | tuple[str, str, str]:
        """Return the run; if the port raises an error, its words and those of a refusal."""
        try:
            with full_precision(is_full):
                return self._sides[is_alone].run(dtype, cotangents, transform)
        except RaisedError as error:
            refused = refusal(error) or PairError(f"{error}")
            return str(error), *refused_words(refused)

    def tried(
        self, is_alone: bool, is_full: bool, dtype: str, inputs: Inputs, transform: str
    ) -> Run | str:
        with full_precision(is_full):
            return self._sides[is_alone].tried(dtype, inputs, transform)

    def computed_in(self, is_alone: bool) -> dict[str, int]:
        return dict(self._sides[is_alone].computed_in())

    def held(self, paths: frozenset[str]) -> Arrays:
        return self._sides[False].held(paths)

    def weights(self) -> tuple[Arrays, frozenset[str]]:
        assert self._weights is not None
        return self._weights.arrays, self._weights.parameters

    def to_torch(self, arrays: Arrays) -> Any:
        """Return the arrays, or the problems of a TransferError."""
        assert self._weights is not None
        try:
            return self._weights.to_torch(arrays)
        except TransferError as error:
            return error.doing, tuple(tuple(problem) for problem in error.problems)

    def misfits(self) -> tuple[Any, ...]:
        assert self._weights is not None
        return tuple(map(tuple, self._weights.misfits(self._side.weights.state)))

    def on_mesh(self) -> tuple[Any, ...]:
        return notes_on_mesh(self._sides[False], self._side.dtype, self._side.differentiated)

    def files(self) -> tuple[str, ...]:
        """Return the files of the user's that are imported."""
        found = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        return tuple(sorted({file for file in found if file and is_users(file)}))


def answered(question: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """Return an answer with the word before it that says how to read it."""
    try:
        return "answer", question(*args)
    except MemoryError as error:
        return "memory", str(error)
    except BaseException as error:  # a user's code may raise anything
        refused = error if isinstance(error, PairError) else refusal(error)
        if refused is None:
            raise  # a mistake of this package
        return "refused", refused_words(refused)


def refused_words(refused: PairError) -> tuple[str, str]:
    """Return the message of a refusal, and the name of the module that is not installed, or ""."""
    return str(refused), refused.name if isinstance(refused, MissingModuleError) else ""


def serve(channel: socket.socket) -> None:
    """Answer questions until the other side closes the channel."""
    with ExitStack() as until_the_end:
        port = Answering(until_the_end)
        while True:
            try:
                name, args = receive(channel)
            except MessageError:
                return
            reply = answered(getattr(port, name), args)
            try:
                send(channel, reply)
            except TypeError as error:
                send(channel, ("refused", (f"{error}", "")))


def main(descriptor: int) -> None:
    """Serve the socket of this descriptor, which no process of the user's inherits."""
    os.set_inheritable(descriptor, False)
    serve(socket.socket(fileno=descriptor))
