"""Cut a kill matrix down to what the README's figures are made from.

    jax-attn verify --power --report DIR; python parity_tests/evidence/kills.py DIR/power.json

writes profile/power.json: environment, summary, and a line for each planted bug.
"""

import json
import sys
from pathlib import Path


def keep(document: dict) -> dict:
    """The same document with, of each bug's trials, their count and its own row's."""
    by_mutant: dict[str, list[dict]] = {}
    for kill in document["kills"]:
        by_mutant.setdefault(kill["mutant"], []).append(kill)
    lines = []
    for mutant, kills in by_mutant.items():
        own = [kill for kill in kills if kill["meant"]]
        times = [kill["times"] for kill in own if kill["times"] is not None]
        least = min(times, default=None)
        rows = sorted({kill["case"] for kill in own})
        lines.append([mutant, rows, least, sum(kill["killed"] for kill in kills), len(kills)])
    kept = {k: v for k, v in document.items() if k != "kills"}
    return kept | {
        "columns": ["planted bug", "its own rows", "times over budget", "killed", "claimed"],
        "mutants": lines,
    }


if __name__ == "__main__":
    kept = keep(json.loads(Path(sys.argv[1]).read_text()))
    text = json.dumps(kept, separators=(",", ":")).replace('],["', '],\n["')
    Path(__file__).parent.joinpath("profile", "power.json").write_text(text + "\n")
