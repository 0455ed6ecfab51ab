"""What stands in for frameworks and processes in the tests of the bench's engine."""

import os
from functools import partial
from typing import ClassVar

import numpy as np

from jax_attn.bench.engine import memory
from jax_attn.bench.engine.worker import usable_cores
from jax_attn.bench.programs.program import UnsuitedError


class StandIn:
    """Served by a real worker process."""

    def echo(self, *given):
        print("noise that must not reach our own output")
        return given

    def peaks(self, sizes):
        """Of calls that each free an array of so many bytes before they end."""

        def call(size):
            np.ones(size, np.uint8)

        return [memory.peak_during(partial(call, size)) for size in sizes]

    def threads(self):
        return os.environ["OMP_NUM_THREADS"], usable_cores()

    def load(self):
        raise ImportError("does not import: it is planted")

    def refuse(self):
        raise UnsuitedError("not for this workload")

    def fail(self):
        raise ArithmeticError("planted\nand more")

    def die(self):
        os.write(2, b"last words\n")
        os._exit(7)


class Fake:
    """In the place of `Worker`: answers at once, from a table of method -> answer by name."""

    answers: ClassVar[dict] = {}
    started: ClassVar[list] = []

    def __init__(self, name, make, *arguments, threads, environment, patience=None):
        self.name, self.environment, self.patience, self.closed = name, environment, patience, False
        self.started.append(self)

    def ask(self, method, *arguments):
        answer = self.answers.get((self.name, method), DEFAULTS.get(method))
        answer = answer(*arguments) if callable(answer) else answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def hang_up(self):
        pass

    def close(self):
        self.closed = True


DEFAULTS = {
    "build": {"kernel": "a kernel", "cache_bytes": 512},
    "compile": (0.5, 1024),
    "first_call": 0.25,
    "tensors": {},
    "peak": 4096,
    "turn": (0.125, 0.0625),
}
