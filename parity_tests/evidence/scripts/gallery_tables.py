"""The page of others' ports: verdicts from the kept records, findings as they were written."""

import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from measuring import PROFILE, ROOT, table

RECORDS = PROFILE / "others_ports.json"
GALLERY = ROOT / "parity_tests" / "gallery"
WHOSE = {
    "theirs": "the port's",
    "choice": "a choice or a default",
    "reference": "the reference's",
    "ours": "this package's",
}
SHORT = {"INCONCLUSIVE": "?", "ERROR": "raises"}
PARTS = ("outputs", "gradients", "state")
FURTHER = ("padding", "bfloat16")
Record = dict[str, Any]


def tables() -> dict[str, str]:
    """Return the parts of the page, by the name of their places."""
    kept = json.loads(RECORDS.read_text())
    findings = tomllib.loads((GALLERY / "findings.toml").read_text())["finding"]
    return {
        "gallery_counts": counts(kept["ports"], findings),
        "gallery_verdicts": verdicts(kept["ports"]),
        "gallery_not_built": not_built(kept["ports"]),
        "gallery_findings": "\n\n".join(finding(each, kept) for each in findings),
    }


def verdict(record: Record) -> str:
    """Return the first word of these that a check of a port has."""
    found = {check["verdict"] for check in record["checks"].values()}
    ranks = ("FAIL", "ERROR", "INCONCLUSIVE", "PASS")
    return next((rank for rank in ranks if rank in found), "not built")


def counts(ports: Mapping[str, Record], findings: list[dict[str, Any]]) -> str:
    """Return how many ports there are, how many pass, and whose the failures are."""
    by = Counter(map(verdict, ports.values()))
    of = {name: each["whose"] for each in findings for name in each["ports"]}
    failing = Counter(of[name] for name, record in ports.items() if verdict(record) == "FAIL")
    words = {
        "PASS": "PASS",
        "FAIL": "FAIL",
        "INCONCLUSIVE": "undecided in a check",
        "ERROR": "an error in a check",
        "not built": "not built",
    }
    shares = [f"{said} {by[key]}" for key, said in words.items() if by[key]]
    whose = ", ".join(f"{WHOSE[key]} {n}" for key, n in failing.most_common())
    sources = Counter(f"{record['package']} {record['version']}" for record in ports.values())
    packages = ", ".join(f"{name} ({n})" for name, n in sources.items())
    return (
        f"{len(ports)} ports of {packages}: {', '.join(shares)}. Whose the differences of the "
        f"failing ones are: {whose}."
    )


def verdicts(ports: Mapping[str, Record]) -> str:
    """Return a row for each port that was built."""
    rows = []
    for name, record in ports.items():
        checks = record["checks"]
        if not checks:
            continue
        first = next(iter(checks.values()))
        worst = max(
            (part.get("budgets", 0.0) for part in map(first.get, PARTS) if part),
            default=0.0,
        )
        cells = [_cell(first.get(part)) for part in PARTS]
        cells += [_cell(checks.get(key)) for key in FURTHER]
        rows.append((name, *cells, f"{worst:.3g}"))
    head = ("port", *PARTS, *FURTHER, "error in budgets")
    return table(head, rows)


def _cell(part: Record | None) -> str:
    return "–" if part is None else SHORT.get(part["verdict"], part["verdict"])


def not_built(ports: Mapping[str, Record]) -> str:
    """Return a row for each port that could not be built, with the reason."""
    rows = [
        (name, record["not built"].replace("|", "\\|"))
        for name, record in ports.items()
        if not record["checks"]
    ]
    return table(("port", "reason"), rows)


def finding(each: dict[str, Any], kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the section of a finding."""
    first = kept["ports"][each["ports"][0]]
    source, line = each["source"], kept["sources"][each["source"]]
    said = [f"> {first['explained']}", ""] if "explained" in first else []
    figures = "; ".join(_figures(name, kept["ports"][name]) for name in each["ports"])
    unknown = [f"- Not known: {each['unknown']}"] if each["unknown"] else []
    return "\n".join(
        [
            f"### {each['title']}",
            "",
            each["differs"],
            "",
            *said,
            f"- Measured: {figures}.",
            f"- Whose: {WHOSE[each['whose']]}.",
            f"- Line: `{source}`: `{line}`",
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


def _figures(name: str, record: Record) -> str:
    """Return the largest error of a port's first failing check, in budgets and relative."""
    check = next(c for c in record["checks"].values() if c["verdict"] == "FAIL")
    parts = []
    for kind in PARTS:
        part = check.get(kind)
        if part and part["verdict"] == "FAIL":
            relative = f", {part['relative']:.1e} of its size" if "relative" in part else ""
            parts.append(f"{kind} {part['budgets']:.3g} budgets (`{part['worst']}`{relative})")
    return f"{name}: {' and '.join(parts) or check['reason']}"
