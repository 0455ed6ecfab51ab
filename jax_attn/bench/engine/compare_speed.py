"""`bench.compare_speed`: time a pair of existing modules in this process."""

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

from jax_attn.bench.engine.plan import BenchPlan
from jax_attn.bench.engine.rounds import Limits
from jax_attn.bench.engine.session import Session
from jax_attn.bench.engine.worker import RefusedError, WorkerError, usable_cores
from jax_attn.bench.implementations import EAGER, WAYS, by_default
from jax_attn.bench.pair.made import timed
from jax_attn.bench.record import Record
from jax_attn.bench.workload import PAIR_MODES
from jax_attn.parity.pair.errors import PairError
from jax_attn.parity.pair.pair import Pair
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

    All ways run in this process, in interleaved rounds, on JAX's default device. They share memory,
    and JAX uses all cores of this process. `jax-attn bench --pair` runs each way in a process of
    its own, also shows where the time goes, and compiles again with a cache.

    Args:
      reference, port, inputs, layout, reference_call, port_call: as for `parity.check`.
      modes: some of "forward", "forward+backward", "training-step". The default is all, or only
        "forward" if the reference has no parameters or a frozen one. The loss is the mean square of
        each output, added up; a training step is AdamW's.
      ways: some of "torch eager", "torch.compile", "torch.compile reduce-overhead", "jax.jit" and,
        for a training step, "jax.jit donated". The default is all, except the third on a CPU, where
        it makes no difference.
      baseline: the way with whose time the others are compared.
      rounds: the exact number of rounds. The default is 7 to 21, fewer for slow calls.
      threads: the number of torch's threads. The default is all cores. JAX uses all cores that this
        process may use.
      untrusted: whether to time a pair that disagrees.

    Returns the record of the run, which `bench.markdown` formats as tables. Raises `PairError`, a
    ValueError, with all that is wrong with the arguments.
    """
    device = "gpu" if jax.default_backend() == "gpu" else "cpu"
    ways = ways or by_default(WAYS, device)
    problems = [
        f"{name}: expected some of {known}, got {given!r}"
        for name, given, known in (
            ("modes", modes or PAIR_MODES, PAIR_MODES),
            ("ways", ways, WAYS),
            ("baseline", (baseline,), WAYS),
        )
        if not set(given) <= set(known)
    ]
    cores = usable_cores()
    problems += [
        f"{name}: expected {expected}, got {given!r}"
        for name, given, expected, most in (
            ("rounds", rounds, "at least 1", math.inf),
            ("threads", threads, f"1 to {cores}, the number of usable cores", cores),
        )
        if given is not None and not 1 <= given <= most
    ]
    if device == "gpu" and not torch.cuda.is_available():
        problems.append(
            "device: expected a GPU that torch can use, because JAX uses one; set "
            "JAX_PLATFORMS=cpu to use the CPU in both"
        )
    given = Pair(
        reference,
        port,
        inputs,
        layout=layout,
        reference_call=reference_call,
        port_call=port_call,
    )
    pair = timed("compare_speed", given, problems)
    plan = BenchPlan(
        ways,
        threads or cores,
        pair=pair,
        modes=modes,
        baseline=baseline,
        device=device,
        limits=Limits.of(rounds),
        untrusted=untrusted,
        alone=False,
    )
    with settings_kept(), Session(plan, start=Here) as session:
        for _ in session.run():
            pass
        return session.record()


class Here:
    """A stand-in for `Worker` without a process of its own."""

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
    """Restore, after this context, the settings of both frameworks that the engines change."""
    of_jax = {name: getattr(jax.config, name) for name in _JAX_SETTINGS}
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    inductor = torch._inductor.config
    caches = inductor.force_disable_caches
    try:
        yield
    finally:
        for name, value in of_jax.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX decides on its cache again when it next compiles
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        inductor.force_disable_caches = caches
