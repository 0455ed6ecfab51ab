"""Tensors that a port writes, made one by one, and their proof. Needs no framework."""

from typing import Any, NamedTuple

import numpy as np

from jax_attn.porting.port.plan import LookedAt, PortPlan
from jax_attn.transfer.arrays import LazyMapping, Spec, Tensors, read, same_bits, specs
from jax_attn.transfer.problems import Problem


class Carried(LazyMapping[np.ndarray]):
    """Tensors that a port writes, by name; each is made on access."""

    def __init__(self, plan: PortPlan, source: Tensors, looked_at: LookedAt = lambda count: None):
        self._plan, self._source, self._looked_at = plan, source, looked_at
        self._moves = {
            name: (move, i) for move in plan.moves for i, name in enumerate(plan.writes(move))
        }
        super().__init__(self._moves)

    def __getitem__(self, name: str) -> np.ndarray:
        move, i = self._moves[name]
        arrays = move.carried(self._plan.to, self._plan.read(self._source, move), "carrying")
        self._looked_at(arrays[i].nbytes)
        return arrays[i]

    def describe(self, name: str) -> Spec:
        """Return shape and dtype name of one tensor, without making it."""
        self._moves[name]
        return self._plan.targets[name]


class Proof(NamedTuple):
    """Result of the comparison of a port's source with what was written.

    carried, passed_over, written: bytes of the source that come back bit for bit, of the source's
    skipped tensors, and of the target. dtype: what the source was cast to first; None for no cast.
    problems: tensors that do not come back.
    """

    carried: int
    passed_over: int
    written: int
    dtype: str | None
    problems: list[Problem]

    def __str__(self) -> str:
        cast = "" if self.dtype is None else f" to the source cast to {self.dtype}"
        return (
            f"{self.carried + self.passed_over:,} bytes: {self.carried:,} carried and verified "
            f"bit-identical{cast} after reading back, {self.passed_over:,} skipped; "
            f"{self.written:,} bytes written"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return self._asdict() | {"problems": [problem._asdict() for problem in self.problems]}


def prove(
    plan: PortPlan, source: Tensors, written: Tensors, looked_at: LookedAt = lambda count: None
) -> Proof:
    """Convert the written tensors back through the table, and compare them with the source.

    written: as read back from the disk. If the plan has a dtype, the source is cast to it first.
    """
    problems = _not_as_planned(plan, written)
    carried = set()
    for move in plan.moves if not problems else ():
        arrays = tuple(read(written, name) for name in plan.writes(move))
        back = move.carried("torch" if plan.to == "flax" else "flax", arrays, "carrying")
        for name, was, now in zip(plan.reads(move), plan.read(source, move), back, strict=True):
            if same_bits(was, now):
                carried.add(name)
            else:
                text = "is not bit-identical after reading back"
                problems.append(Problem("unwritten", name, text))
            looked_at(now.nbytes)
    named = {name for move in plan.moves for name in plan.reads(move)}
    left = plan.sources.keys() - named - plan.passed_over.keys()
    problems += [
        Problem("unwritten", name, "no row of the table reads it") for name in sorted(left)
    ]
    return Proof(
        sum(plan.sources[name].nbytes for name in carried),
        sum(plan.sources[name].nbytes for name in plan.passed_over if name in plan.sources),
        sum(spec.nbytes for spec in plan.targets.values()),
        plan.dtype,
        problems,
    )


def _not_as_planned(plan: PortPlan, written: Tensors) -> list[Problem]:
    """Report names, shapes and dtypes that differ from the plan's."""
    described, problems = specs(written)
    for name, spec in described.items():
        if name not in plan.targets:
            problems.append(Problem("unexpected", name, f"written, but not in the plan, {spec}"))
    for name, spec in plan.targets.items():
        if (now := described.get(name)) != spec:
            problems.append(Problem("unwritten", name, f"expected {spec}, read back {now}"))
    return problems
