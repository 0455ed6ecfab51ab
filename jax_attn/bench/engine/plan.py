"""What a run of the bench measures, and how."""

from dataclasses import dataclass, field

from jax_attn.bench.arrays import SEED
from jax_attn.bench.engine.rounds import Limits
from jax_attn.bench.implementations import IMPLEMENTATIONS, REFERENCE
from jax_attn.bench.workload import CACHED, MODES, Workload


@dataclass(frozen=True)
class SessionPlan:
    """The workloads, implementations and settings of a run."""

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
        """The dtype of all workloads."""
        return self.workloads[0].dtype

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations in the record; the baseline and the reference are always included."""
        wanted = {*self.implementations, self.baseline, REFERENCE}
        return tuple(name for name in IMPLEMENTATIONS if name in wanted)

    @property
    def judged(self) -> tuple[str, ...]:
        """`names`, the reference first, because others' errors are compared with its own."""
        return tuple(sorted(self.names, key=lambda name: name != REFERENCE))

    @property
    def started(self) -> tuple[str, ...]:
        """Those of `names` that have a program for any of the workloads."""
        return tuple(
            name
            for name in self.names
            if not all(IMPLEMENTATIONS[name].lacks(workload) for workload in self.workloads)
        )

    def modes_of(self, workload: Workload) -> tuple[str, ...]:
        """The modes in which the workload is measured."""
        return tuple(mode for mode in workload.modes if mode in self.modes)
