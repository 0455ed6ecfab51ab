"""A golden reference without its answers: all that the process of a port receives of it."""

from dataclasses import dataclass
from typing import Any, Self

from jax_attn.parity.checking.reference_side import NotAskedError, ReferenceSide
from jax_attn.parity.checking.weights import Weights
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs


@dataclass(frozen=True, eq=False)
class Unanswered(ReferenceSide):
    """The inputs and cotangents of a port, and what was fixed when the reference was captured.

    weights: names, shapes and digests of the reference's weights.
    """

    dtype: str
    gradients: bool
    seed: int
    inputs: Inputs
    parameters: frozenset[str] | None
    differentiated: Arrays
    weights: Weights

    @classmethod
    def of(cls, golden: ReferenceSide) -> Self:
        """Leave out of a golden reference what a port should compute."""
        names = ("dtype", "gradients", "seed", "inputs", "parameters", "differentiated")
        held = {name: getattr(golden, name) for name in names}
        return cls(**held, weights=golden.answer("weights"))

    def answer(self, question: str) -> Any:
        if question != "weights":
            raise NotAskedError("a reference without answers")
        return self.weights
