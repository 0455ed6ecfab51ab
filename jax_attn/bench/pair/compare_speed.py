"""`bench.compare_speed`: a pair of modules that exist, timed in this process."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from jax_attn.bench.engine.rounds import Limits
from jax_attn.bench.engine.worker import RefusedError, WorkerError, usable_cores
from jax_attn.bench.pair.made import pair_of
from jax_attn.bench.pair.session import PairPlan, PairSession
from jax_attn.bench.pair.ways import EAGER, WAYS, ways_on
from jax_attn.bench.record import Record
from jax_attn.bench.workload import PAIR_MODES, PairError
from jax_attn.transfer import Layout

_JAX_SETTINGS = ("jax_default_matmul_precision", "jax_enable_compilation_cache")


def compare_speed(
    reference: torch.nn.Module,
    port: nnx.Module,
    inputs: tuple[np.ndarray, ...] | Mapping[str, np.ndarray],
    *,
    layout: Layout | None = None,
    reference_call: Callable[..., Any] | None = None,
    port_call: Callable[..., Any] | None = None,
    modes: tuple[str, ...] = (),
    ways: tuple[str, ...] = (),
    baseline: str = EAGER,
    rounds: int | None = None,
    threads: int | None = None,
    untrusted: bool = False,
) -> Record:
    """Time a torch module and its port, each in several ways, unless `parity.check` fails them.

    All run in this process, in interleaved rounds, on JAX's default device, so that their memory is
    shared and JAX takes the cores that this process has; `jax-attn bench --pair` gives each a
    process of its own, says where the time goes, and compiles again with a cache.

    Args:
      reference, port, inputs, layout, reference_call, port_call: as for `parity.check`.
      modes: of "forward", "forward+backward", "training-step"; all unless given, or "forward" alone
        of a reference with frozen parameters or none. The loss is the mean square of each
        output, added up; a step is AdamW's.
      ways: of "torch eager", "torch.compile", "torch.compile reduce-overhead", "jax.jit" and, for
        a training step, "jax.jit donated"; all unless given, but for the third, which differs on
        a GPU alone.
      baseline: the way whose time the others' are compared with.
      rounds: exactly so many; 7 to 21 unless given, fewer for slow calls.
      threads: of torch; all cores unless given. JAX takes all that this process may use.
      untrusted: whether to time a pair that disagrees.

    Returns the record of the run, of which `bench.markdown` makes a table. Raises `PairError`, a
    ValueError, with all that is wrong with the arguments.
    """
    device = "gpu" if jax.default_backend() == "gpu" else "cpu"
    ways = ways or ways_on(device)
    problems = [
        f"{name}: expected some of {known}, got {given!r}"
        for name, given, known in (
            ("modes", modes or PAIR_MODES, PAIR_MODES),
            ("ways", ways, tuple(WAYS)),
            ("baseline", (baseline,), tuple(WAYS)),
        )
        if not set(given) <= set(known)
    ]
    cores = usable_cores()
    problems += [
        f"{name}: expected {expected}, got {given!r}"
        for name, given, expected, most in (
            ("rounds", rounds, "at least 1", math.inf),
            ("threads", threads, f"1 to {cores}, the cores here", cores),
        )
        if given is not None and not 1 <= given <= most
    ]
    if device == "gpu" and not torch.cuda.is_available():
        problems.append(
            "device: expected a GPU that torch can use, as JAX uses one; JAX_PLATFORMS=cpu has "
            "both use the CPU"
        )
    given = (reference, port, inputs, layout, (reference_call, port_call))
    pair = pair_of("compare_speed", given, problems)
    plan = PairPlan(
        pair,
        threads or cores,
        ways,
        modes,
        baseline,
        device,
        limits=Limits.of(rounds),
        untrusted=untrusted,
        alone=False,
    )
    with settings_kept(), PairSession(plan, start=Here) as session:
        for _ in session.run():
            pass
        return session.record()


class Here:
    """As a `Worker`, without a process of its own."""

    def __init__(self, name: str, make: str, *arguments: Any, **_: Any) -> None:
        self.name, self._served = name, resolve_name(make)(*arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._served, method)(*arguments)
        except PairError as error:
            raise RefusedError(str(error)) from error
        except Exception as error:
            raise WorkerError(f"{method}: {type(error).__name__}: {error}") from error

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        del self._served


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """What engines set for their process is set back."""
    of_jax = {name: getattr(jax.config, name) for name in _JAX_SETTINGS}
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    inductor = torch._inductor.config
    caches = inductor.force_disable_caches
    try:
        yield
    finally:
        for name, value in of_jax.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX decides about it again when it next compiles
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        inductor.force_disable_caches = caches
