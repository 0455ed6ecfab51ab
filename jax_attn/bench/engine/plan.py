"""What a run of the bench measures, and how."""

from dataclasses import dataclass, field

from jax_attn.bench.arrays import SEED
from jax_attn.bench.engine.rounds import Limits
from jax_attn.bench.implementations import IMPLEMENTATIONS, REFERENCE
from jax_attn.bench.workload import CACHED, MODES, Workload


@dataclass(frozen=True)
class SessionPlan:
    """What is to be measured, and how."""

    workloads: tuple[Workload, ...]
    implementations: tuple[str, ...]
    threads: int
    modes: tuple[str, ...] = (*MODES, *CACHED)
    baseline: str = REFERENCE
    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    seed: int = SEED

    @property
    def dtype(self) -> str:
        """Of all its workloads."""
        return self.workloads[0].dtype

    @property
    def names(self) -> tuple[str, ...]:
        """Who has rows: the baseline, and whose error is the measure, are always there."""
        wanted = {*self.implementations, self.baseline, REFERENCE}
        return tuple(name for name in IMPLEMENTATIONS if name in wanted)

    @property
    def judged(self) -> tuple[str, ...]:
        """`names`, the reference first: its own error is the measure of the others'."""
        return tuple(sorted(self.names, key=lambda name: name != REFERENCE))

    @property
    def started(self) -> tuple[str, ...]:
        """Of `names`, who has a program for any of the workloads."""
        return tuple(
            name
            for name in self.names
            if not all(IMPLEMENTATIONS[name].lacks(workload) for workload in self.workloads)
        )

    def modes_of(self, workload: Workload) -> tuple[str, ...]:
        """In which of the modes the workload is measured."""
        return tuple(mode for mode in workload.modes if mode in self.modes)
