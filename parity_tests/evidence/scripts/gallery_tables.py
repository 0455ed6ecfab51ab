"""The page of others' ports: verdicts from the kept records, findings as they were written."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from measuring import PROFILE, ROOT, table

RECORDS = PROFILE / "others_ports.json"
GALLERY = ROOT / "parity_tests" / "gallery"
CAUSES = {
    "port": "an error in the port",
    "unsupported": "a config that the port does not support and does not refuse",
    "choice": "a choice or a default",
}
"""The causes of `findings.toml`, as the page names them."""
SHORT = {"INCONCLUSIVE": "?", "ERROR": "raises"}
PARTS = ("outputs", "gradients", "state")
FURTHER = ("padding", "bfloat16")
CALLER = re.compile(r" \(measured\.py:\d+\)")
"""The line of the gallery that calls a check, which `explain` names for a layer of torch's own."""
Record = dict[str, Any]


def tables() -> dict[str, str]:
    """Return the parts of the page, by the name of their places."""
    kept = json.loads(RECORDS.read_text())
    return {
        "gallery_counts": counts(kept["ports"], findings()),
        "gallery_verdicts": verdicts(kept["ports"]),
        "gallery_undecided": undecided(kept["ports"]),
        "gallery_findings": "\n\n".join(finding(each, kept) for each in findings()),
    }


def findings() -> list[dict[str, Any]]:
    """Return the findings, as they were written by hand."""
    return tomllib.loads((GALLERY / "findings.toml").read_text())["finding"]


def verdict(record: Record) -> str:
    """Return the first word of these that a check of a port has."""
    found = {check["verdict"] for check in record["checks"].values()}
    ranks = ("FAIL", "ERROR", "INCONCLUSIVE", "PASS")
    return next((rank for rank in ranks if rank in found), "not built")


def counts(ports: Mapping[str, Record], findings: list[dict[str, Any]]) -> str:
    """Return how many ports there are, how many pass, and the causes of the failures."""
    by = Counter(map(verdict, ports.values()))
    of = {name: each["cause"] for each in findings for name in each["ports"]}
    failing = Counter(of[name] for name, record in ports.items() if verdict(record) == "FAIL")
    words = {
        "PASS": "pass",
        "FAIL": "fail",
        "INCONCLUSIVE": "undecided in a check",
        "ERROR": "with an error in a check",
        "not built": "not built",
    }
    shares = ", ".join(f"{by[key]} {said}" for key, said in words.items() if by[key])
    causes = ", ".join(f"{n} {CAUSES[key]}" for key, n in failing.most_common())
    sources = Counter(f"{record['package']} {record['version']}" for record in ports.values())
    packages = ", ".join(f"{name} ({n})" for name, n in sources.items())
    return (
        f"{len(ports)} ports of {packages}: {shares}. The causes of the failures: {causes}. "
        f"The {len(findings)} findings below give each; several ports may share one."
    )


def verdicts(ports: Mapping[str, Record]) -> str:
    """Return a row for each port that was built."""
    rows = []
    for name, record in ports.items():
        checks = record["checks"]
        if not checks:
            continue
        first = next(iter(checks.values()))
        cells = [_cell(first.get(part)) for part in PARTS]
        cells += [_cell(checks.get(key)) for key in FURTHER]
        rows.append((name, *cells, _error(first)))
    head = ("port", *PARTS, *FURTHER, "error in budgets")
    return table(head, rows)


def _cell(part: Record | None) -> str:
    return "–" if part is None else SHORT.get(part["verdict"], part["verdict"])


def _error(check: Record) -> str:
    """Return the largest error of a check; – if one was not measured, as of another shape."""
    parts = [check[part] for part in PARTS if part in check]
    if not parts or any(part["verdict"] == "FAIL" and "budgets" not in part for part in parts):
        return "–"
    return _number(max(part.get("budgets", 0.0) for part in parts))


def _number(x: float) -> str:
    """Return a number with three figures and no exponent, as 25,100,000."""
    return f"{float(f'{x:.3g}'):,.10g}"


def undecided(ports: Mapping[str, Record]) -> str:
    """Return a row for each port that was not built and each check without a verdict."""
    rows = []
    for name, record in ports.items():
        if "not built" in record:
            rows.append((name, "none: not built", record["not built"]))
        for key, check in record["checks"].items():
            if check["verdict"] in SHORT:
                rows.append((name, key, check["reason"]))
    return table(
        ("port", "check", "reason"), [[cell.replace("|", "\\|") for cell in row] for row in rows]
    )


def finding(each: dict[str, Any], kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the section of a finding."""
    records = {name: kept["ports"][name] for name in each["ports"]}
    said = dict.fromkeys(
        CALLER.sub("", record["explained"]) for record in records.values() if "explained" in record
    )
    figures = [f"{name}: {_figures(record)}" for name, record in records.items()]
    lines = [f"`{source}`: `{kept['sources'][source]}`" for source in each["sources"]]
    unknown = [f"- Not known: {each['unknown']}"] if each["unknown"] else []
    return "\n".join(
        [
            f"### {each['title']}",
            "",
            each["differs"],
            "",
            *(f"> {sentence}\n" for sentence in said),
            *_listed("Measured", figures),
            f"- Cause: {CAUSES[each['cause']]}.",
            *_listed("Source", lines),
            f"- Concerns: {each['concerns']}",
            *unknown,
            "",
            f"```{{literalinclude}} ../../parity_tests/gallery/repros/{each['repro']}",
            "```",
            "",
            "It prints:",
            "",
            *(f"    {text}" for text in kept["repros"][each["repro"]].splitlines()),
        ]
    )


def _listed(word: str, entries: list[str]) -> list[str]:
    if len(entries) == 1:
        return [f"- {word}: {entries[0]}"]
    return [f"- {word}:", *(f"  - {entry}" for entry in entries)]


def _figures(record: Record) -> str:
    """Return the largest errors of a port's first failing check, in budgets and relative."""
    check = next(c for c in record["checks"].values() if c["verdict"] == "FAIL")
    parts = [
        f"{kind} {_figure(check[kind])}"
        for kind in PARTS
        if kind in check and check[kind]["verdict"] == "FAIL" and "budgets" in check[kind]
    ]
    return "; ".join(parts) or check["reason"]


def _figure(part: Record) -> str:
    name = f"input {part['worst']}" if part["worst"].isdigit() else f"`{part['worst']}`"
    relative = f", relative error {part['relative']:.2g}" if "relative" in part else ""
    return f"{_number(part['budgets'])} budgets ({name}{relative})"
