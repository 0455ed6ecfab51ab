"""Cut a report down to what the figures of README and docs are made from.

    jax-attn verify --all --report DIR            then  python reduce.py DIR/result.json NAME
    jax-attn power --report DIR             then  python reduce.py DIR/power.json
    jax-attn calibrate --report DIR         then  python reduce.py DIR/calibration.json

writes ../data/NAME.json, ../data/profile/power.json or ../data/profile/calibration.json.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from measuring import DATA


def of_cases(document: dict) -> dict:
    """Of a run of checks: the tensor that decides each case, and no other."""
    lines = []
    for case in document["cases"]:
        label, worst = max(case["tensors"].items(), key=lambda item: item[1]["fraction"] or 0.0)
        identity = [case[k] for k in ("name", "backend", "level", "verdict")]
        lines.append([*identity, label, worst["fraction"], worst["ratio"]])
    return _without(document, "cases") | {
        "kernels": sorted({case["implementation"] for case in document["cases"]}),
        "columns": ["name", "backend", "level", "verdict", "worst", "fraction", "ratio"],
        "cases": lines,
    }


def of_kills(document: dict) -> dict:
    """Of a kill matrix: the count of each bug's trials, and the trial on its own row."""
    trials: dict[str, list[dict]] = {}
    for kill in document["kills"]:
        trials.setdefault(kill["bug"], []).append(kill)
    lines = []
    for bug, kills in trials.items():
        own = [kill for kill in kills if kill["meant"]]
        least = min((k["times"] for k in own if k["times"] is not None), default=None)
        rows = sorted({kill["case"] for kill in own})
        lines.append([bug, rows, least, sum(kill["killed"] for kill in kills), len(kills)])
    return _without(document, "kills") | {
        "columns": ["planted bug", "its own rows", "times over budget", "killed", "claimed"],
        "bugs": lines,
    }


def of_configurations(document: dict) -> dict:
    """Of a calibration: its figures, and the configurations that do not pass."""
    return _without(document, "configurations", "columns")


def _without(document: dict, *names: str) -> dict:
    return {name: value for name, value in document.items() if name not in names}


REDUCTIONS: dict[str, Callable[[dict], dict]] = {
    "result": of_cases,
    "power": of_kills,
    "calibration": of_configurations,
}


if __name__ == "__main__":
    source = Path(sys.argv[1])
    name = f"{sys.argv[2]}.json" if source.stem == "result" else f"profile/{source.name}"
    reduced = REDUCTIONS[source.stem](json.loads(source.read_text()))
    text = json.dumps(reduced, separators=(",", ":"))
    text = text.replace('],["', '],\n["').replace('},{"', '},\n{"')
    (DATA / name).write_text(text + "\n")
