"""The kept records of ports: read, written whole, and summed up in a word."""

import json
import os
from collections.abc import Mapping
from typing import Any

from measuring import PROFILE

from gallery.measured import Record

PATH = PROFILE / "others_ports.json"


def kept() -> dict[str, Record]:
    """Return every record, by the port's name."""
    return json.loads(PATH.read_text())["ports"] if PATH.exists() else {}


def keep(name: str, record: Record) -> dict[str, Record]:
    """Add or replace a record in the file; return all."""
    every = dict(sorted({**kept(), name: record}.items()))
    partial = PATH.with_suffix(".partial")
    partial.write_text(as_text(every))
    os.replace(partial, PATH)
    return every


def as_text(every: Mapping[str, Record]) -> str:
    """Return records as JSON, a check a line, so that a new run changes only lines that differ."""
    ports = ",\n".join(f"{json.dumps(name)}: {_lines(record)}" for name, record in every.items())
    return f'{{"ports": {{\n{ports}\n}}}}\n'


def _lines(record: Mapping[str, Any]) -> str:
    fields = (f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in record.items())
    return "{\n" + ",\n".join(fields) + "\n}"


def verdict(record: Record) -> str:
    """Return one word over all checks of a record."""
    verdicts = [check["verdict"] for check in record["checks"].values()]
    ranks = ("FAIL", "ERROR", "INCONCLUSIVE", "PASS")
    return next((rank for rank in ranks if rank in verdicts), "not built")
