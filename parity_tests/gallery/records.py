"""The kept records of ports and findings: read, and written whole."""

import json
import os
from collections.abc import Mapping
from typing import Any

from gallery_tables import RECORDS, Record


def kept(part: str = "ports") -> dict[str, Record]:
    """Return the records of a part, by name: "ports", "repros" or "sources"."""
    return _read().get(part, {})


def keep(name: str, record: Any, part: str = "ports") -> dict[str, Record]:
    """Add or replace a record in the file; return all of its part."""
    every = _read()
    every[part] = dict(sorted({**every.get(part, {}), name: record}.items()))
    partial = RECORDS.with_suffix(".partial")
    partial.write_text(as_text(every))
    os.replace(partial, RECORDS)
    return every[part]


def _read() -> dict[str, dict[str, Record]]:
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def as_text(every: Mapping[str, Mapping[str, Any]]) -> str:
    """Return records as JSON, a field a line, so that a new run changes only lines that differ."""
    parts = (
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {_lines(each)}" for name, each in records.items())
        + "\n}"
        for part, records in every.items()
    )
    return "{" + ",\n".join(parts) + "}\n"


def _lines(record: Any) -> str:
    if not isinstance(record, Mapping):
        return json.dumps(record, ensure_ascii=False)
    fields = (f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in record.items())
    return "{\n" + ",\n".join(fields) + "\n}"
