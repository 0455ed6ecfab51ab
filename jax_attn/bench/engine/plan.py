"""Plan a run of the bench: what it measures, and how."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jax_attn.bench.arrays import SEED
from jax_attn.bench.engine.rounds import Limits
from jax_attn.bench.implementations import IMPLEMENTATIONS, REFERENCE
from jax_attn.bench.workload import Workload

if TYPE_CHECKING:
    from jax_attn.bench.pair.pair import TimedPair


@dataclass(frozen=True)
class BenchPlan:
    """The plan of a run: workloads of presets or a pair, and its settings.

    implementations: names in IMPLEMENTATIONS. pair: the function that makes the pair, the
    checkpoint, or the pair, as `made` takes it. modes: those to measure; () are all, or a pair's
    usual ones. baseline: the name with whose times the others are compared. lengths: lengths of a
    pair's inputs. untrusted: whether to time a pair that disagrees. alone: whether each
    implementation runs in a process of its own, where compiled programs can be discarded.
    """

    implementations: tuple[str, ...]
    threads: int
    workloads: tuple[Workload, ...] = ()
    pair: "str | TimedPair | None" = None
    modes: tuple[str, ...] = ()
    baseline: str = REFERENCE
    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    seed: int = SEED
    lengths: tuple[int, ...] = ()
    untrusted: bool = False
    alone: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations in the record, with the baseline and, of presets, the reference."""
        wanted = {*self.implementations, self.baseline}
        wanted |= {REFERENCE} if self.pair is None else set()
        return tuple(name for name in IMPLEMENTATIONS if name in wanted)

    @property
    def name(self) -> str:
        """The name of the pair in the record."""
        return self.pair if isinstance(self.pair, str) else "the pair"

    def modes_of(self, workload: Workload) -> tuple[str, ...]:
        """Return the modes in which a preset's workload is measured."""
        return tuple(mode for mode in workload.modes if not self.modes or mode in self.modes)
