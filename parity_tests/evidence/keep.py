"""Cut a report's result.json down to what the README's figures are made from.

    jax-attn verify --report DIR; python parity_tests/evidence/keep.py DIR/result.json NAME

writes NAME.json beside this file: environment, summary, the kernels, and a line for each case.
"""

import json
import sys
from pathlib import Path


def keep(document: dict) -> dict:
    """The same document without the tensors that do not decide a case."""
    cases = []
    for case in document["cases"]:
        label, worst = max(case["tensors"].items(), key=lambda item: item[1]["fraction"] or 0.0)
        line = [case[k] for k in ("name", "backend", "level", "verdict")]
        cases.append([*line, label, worst["fraction"], worst["ratio"]])
    kept = {k: v for k, v in document.items() if k != "cases"}
    kept["kernels"] = sorted({case["implementation"] for case in document["cases"]})
    return kept | {
        "columns": ["name", "backend", "level", "verdict", "worst", "fraction", "ratio"],
        "cases": cases,
    }


if __name__ == "__main__":
    source, name = sys.argv[1:]
    kept = keep(json.loads(Path(source).read_text()))
    text = json.dumps(kept, indent=None, separators=(",", ":"))
    text = text.replace('],["', '],\n["').replace('},{"', '},\n{"')
    Path(__file__).with_name(f"{name}.json").write_text(text + "\n")
