"""Check the ports of others that are installed, and keep what came out.

    python -m gallery [--list] [--minutes 60] [--again] [PATTERN ...]   # from parity_tests/
    python -m gallery --repros

Each port is one process with a limit of time. Its record is kept as soon as it is there, so a run
that was stopped goes on; `--again` also runs ports that have one. Ports of packages that are not
installed are passed over, and keep their records from another environment. `--repros` runs the
scripts of the findings, and reads the lines of source that they name. Then
`python parity_tests/evidence/scripts/fill_docs.py` writes the page.
"""

import argparse
import fnmatch
import importlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from gallery_tables import Record, findings, verdict

from gallery import readings, records
from gallery.measured import measured
from gallery.port import PACKAGES, Port
from gallery.ports import every

SECONDS = 600
"""The limit of one port."""
SECONDS_TO_END = 10
"""How long a process may take to end after it gave its record."""


def _child(port: Port, queue: Any) -> None:
    queue.put(measured(port))


def run(port: Port) -> Record:
    """Return the record of one port, measured in a process of its own."""
    context = multiprocessing.get_context("fork")  # what is imported here is there at once
    queue = context.SimpleQueue()
    process = context.Process(target=_child, args=(port, queue))
    process.start()
    end = time.monotonic() + SECONDS
    while process.is_alive() and queue.empty() and time.monotonic() < end:
        process.join(0.2)
    if not queue.empty():
        record: Record = queue.get()
        process.join(SECONDS_TO_END)
        process.kill()
        return record
    reason = f"ended with {process.exitcode}"
    if process.is_alive():
        process.kill()
        reason = f"took longer than {SECONDS} s"
    process.join()
    return {"package": port.package, "version": port.installed, "checks": {}, "not built": reason}


def _ready(packages: Iterable[str]) -> None:
    """Import what every process needs, without a thread or a device that a fork would lose."""
    os.environ["KERAS_BACKEND"] = "jax"
    warnings.filterwarnings("ignore")
    for name in ("torch._dynamo", "transformers.generation", *packages):
        with suppress(ImportError):
            importlib.import_module(name.replace("-", "_"))


def read_again() -> None:
    """Keep what the repros print, and the lines of source that the findings name."""
    for finding in findings():
        print(f"{finding['title']}:")
        for source in finding["sources"]:
            if (line := readings.quoted(source)) is not None:
                records.keep(source, line, "sources")
            print(line or f"{source}: not installed")
        if (text := readings.printed(finding["repro"])) is not None:
            records.keep(finding["repro"], text, "repros")
        print(text or f"{finding['repro']}: a package is not installed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gallery")
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="names, such as 'keras-hub*'"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="start no port after these")
    parser.add_argument("--again", action="store_true", help="also ports that have a record")
    parser.add_argument("--list", action="store_true", help="list the ports and run none")
    parser.add_argument("--repros", action="store_true", help="run the scripts of the findings")
    given = parser.parse_args()
    if given.repros:
        return read_again()
    chosen = [p for p in every() if any(fnmatch.fnmatch(p.name, x) for x in given.patterns or "*")]
    if not chosen:
        parser.error(f"PATTERN: no port has such a name: {', '.join(given.patterns)}")
    if not given.list:
        _ready({port.package for port in chosen if port.installed})
    kept, end = records.kept(), time.monotonic() + 60 * given.minutes
    for port in chosen:
        done = kept.get(port.name)
        if given.list:
            print(port.name, verdict(done) if done else "no record")
            continue
        if port.installed is None:
            print(f"{port.name}: not installed; {PACKAGES[port.package][1]}")
        elif done and not given.again and done["version"] == port.installed:
            print(f"{port.name}: has a record, {verdict(done)}")
        elif time.monotonic() > end:
            print(f"{port.name}: no time left")
        else:
            record = run(port)
            kept = records.keep(port.name, record)
            print(
                f"{port.name}: {verdict(record)} ({record.get('seconds', SECONDS)} s)",
                record.get("not built") or record.get("explained", ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
