"""An object in a process of its own, which answers one request at a time over a pipe."""

import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from jax_attn.bench.engine import memory
from jax_attn.bench.programs.program import UnsuitedError
from jax_attn.parity.pair.errors import PairError

# A hang must not block the run for ever. The slowest answer is that of a large compilation.
PATIENCE_SECONDS = 900.0
_GOODBYE_SECONDS = 3.0
_SPAWN = get_context("spawn")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerError(RuntimeError):
    """A request failed in a worker; the message is one line."""


class AbsentError(WorkerError):
    """The worker's package cannot be imported."""


class RefusedError(WorkerError):
    """The worker's implementation cannot serve the workload."""


class LostError(WorkerError):
    """The worker's process died, or did not answer."""


_ERRORS = {"absent": AbsentError, "refused": RefusedError, "failed": WorkerError}


class Worker:
    """A process that holds `make(*arguments)`; `worker.ask("method", …)` calls a method there.

    make: "module:class", so that the environment is set before frameworks load. threads: the number
    of cores that it may run on, which sets the threads of both frameworks (XLA uses one per core).
    patience: the seconds to wait for an answer; None waits for ever.
    """

    def __init__(
        self,
        name: str,
        make: str,
        *arguments: Any,
        threads: int,
        environment: Mapping[str, str] | None = None,
        patience: float | None = PATIENCE_SECONDS,
    ) -> None:
        self.name, self.patience = name, patience
        handle, log = tempfile.mkstemp(prefix="jax-attn-bench-", suffix=".log")
        os.close(handle)
        self._log = Path(log)
        self._pipe, theirs = _SPAWN.Pipe()
        settings = dict.fromkeys(_THREADS, str(threads)) | dict(environment or {})
        args = (theirs, log, threads, settings, make, arguments)
        self._process = _SPAWN.Process(target=_serve, args=args, daemon=True, name=name)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call the method and return its result. Raises WorkerError with the method's error."""
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(self.patience):
                self.close()
                raise LostError(f"{method}: no answer in {self.patience:.0f} s")
            kind, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise LostError(f"{method}: {self._last_words()}") from error
        if kind == "done":
            return answer
        raise _ERRORS[kind](answer)

    def hang_up(self) -> None:
        """Tell the process to end, without waiting for it."""
        self._pipe.close()

    def close(self) -> None:
        """End the process: an idle one may tidy up, a busy one is killed."""
        self.hang_up()
        self._process.join(_GOODBYE_SECONDS)
        self._process.kill()
        self._process.join()
        self._log.unlink(missing_ok=True)

    def _last_words(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return "its process was killed, perhaps because memory ran out"
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"its process ended with status {code}: {last}"


def _serve(
    pipe: Connection,
    log: str,
    threads: int,
    settings: Mapping[str, str],
    make: str,
    arguments: tuple[Any, ...],
) -> None:
    """Serve requests in the worker's process; all that it prints goes to the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    with open(log, "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(settings)
    memory.one_arena()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    served = resolve_name(make)(*arguments)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(served, method, arguments))


def _answer(served: Any, method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "done", getattr(served, method)(*arguments)
    except (UnsuitedError, PairError) as error:
        return "refused", str(error)
    except Exception as error:
        import traceback

        traceback.print_exc(file=sys.stderr)
        if isinstance(error, ImportError) and method == "load":
            return "absent", str(error)
        first = str(error).strip().partition("\n")[0]
        return "failed", f"{method}: {type(error).__name__}: {first}"


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
