"""On how many models of transformers the translation works.

    python parity_tests/evidence/scripts/translated_models.py [--forward | --built]
        [--draw N --seed S] [--rows FILE] [NAME ...]

builds a small model of each type of the installed transformers (small_transformers.py says how),
translates it, and proves it with `prove`, at varying sizes where it takes them: all types, those
named, or N drawn at random. Each is one process with a limit of time and memory. A row is appended
to FILE as soon as it is there, and types that have one of the same level are passed over, so a run
that was stopped goes on. `--forward` compares outputs once, which is far less than a proof: no
gradients, no budget, no other sizes. `--built` only builds the models and runs them in torch. At
the end a summary groups what fails by reason.

`--keep` writes what the rows of FILE say to profile/translated_models.json.
"""

import argparse
import json
import multiprocessing
import random
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import small_transformers
import torch
import transformers
from flax import nnx
from measuring import keep

from jax_attn.translate import Translation, TranslationError, both_modes, prove, translate
from jax_attn.translate.outputs import called
from jax_attn.translate.proof import loaded
from jax_attn.translate.tracing.export.exported import Exported

GIB = 2**30
LIMIT_GIB = 12
SECONDS = {"built": 60, "forward": 300, "proof": 900}
SCREEN = 2.0**-13
"""Outputs that differ by more of their scale are listed as different, where nothing is proved."""
WORKED = ("built", "equal", "PASS")
COLUMNS = (
    *("type", "class", "level", "outcome", "parameters", "modules", "lines", "varying"),
    *("export_seconds", "our_seconds", "tensors", "fraction", "error", "kind", "reason"),
    "fixed_because",
)
Row = dict[str, Any]


# --- one model, in a process of its own -----------------------------------------------------


def measured(name: str, level: str) -> Row:
    """Return the row of one type."""
    row: Row = {"type": name, "level": level}
    try:
        small = small_transformers.build(small_transformers.types()[name])
    except small_transformers.NotBuiltError as error:
        return row | {"outcome": "not built", "reason": str(error)}
    reference = small.model
    row |= {
        "class": type(reference).__name__,
        "parameters": sum(each.numel() for each in reference.parameters()),
        "modules": len(list(reference.modules())),
        "inputs": {key: list(value.shape) for key, value in small.inputs.items()},
        "cut": small.cut,
    }
    if level == "built":
        return row | {"outcome": "built"}
    try:
        found, dynamic, facts = _translated(reference, small.inputs)
        row |= facts | {"lines": found.source.count("\n")}
        judge = _forward if level == "forward" else _proof
        return row | judge(found, reference, small.inputs, dynamic)
    except TranslationError as error:
        return row | {"outcome": "refused"} | _refusal(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return row | {
            "outcome": "error",
            "kind": type(error).__name__,
            "reason": f"{str(error).strip()[:300]} ({where})",
        }


def _dynamic(inputs: Mapping[str, torch.Tensor]) -> list[dict[str, dict[int, str]]]:
    """Return what may vary: the batch and lengths of text, the batch alone, nothing."""
    batch = {name: {0: "B"} for name in inputs}
    lengths = {"input_ids": "T", "decoder_input_ids": "S", "bbox": "T"}
    both = {
        name: {0: "B", 1: lengths[name]} if name in lengths else axes
        for name, axes in batch.items()
    }
    return [both, batch, {}] if both != batch else [batch, {}]


def _translated(
    reference: torch.nn.Module, inputs: Mapping[str, torch.Tensor]
) -> tuple[Translation, Any, Row]:
    """Translate with as many varying sizes as the model takes, and time it."""
    exports: list[Exported] = []
    made = both_modes.exported

    def recorded(*arguments: Any, **options: Any) -> Exported:
        exports.append(made(*arguments, **options))
        return exports[-1]

    reasons: Row = {}
    for dynamic in _dynamic(inputs):
        begun = time.perf_counter()
        try:
            exports.clear()
            with patch.object(both_modes, "exported", recorded):
                found = translate(reference, inputs, dynamic=dynamic)
        except TranslationError as error:
            if not dynamic or all(each.kind == "operator" for each in error.problems):
                raise
            reasons.setdefault("fixed_because", _refusal(error)["reason"])
            continue
        seconds = time.perf_counter() - begun
        return (
            found,
            dynamic,
            reasons
            | {
                "varying": sorted({size for axes in dynamic.values() for size in axes.values()}),
                "export_seconds": (of_export := sum(each.seconds for each in exports)),
                "our_seconds": seconds - of_export,
            },
        )
    raise AssertionError("the last trial either returns or raises")


def _refusal(error: TranslationError) -> Row:
    first = error.problems[0]
    place = f" ({Path(first.file).name}: {first.text})" if first.file else ""
    return {
        "kind": first.kind,
        "reason": f"{first.operator}: {first.reason[:300]}{place}",
        "operators": sorted({each.operator for each in error.problems if each.kind == "operator"}),
    }


def _forward(
    found: Translation, reference: torch.nn.Module, inputs: Mapping[str, torch.Tensor], _: Any
) -> Row:
    graph, state = nnx.split(loaded(found, reference))
    arrays = {name: value.numpy() for name, value in inputs.items()}
    ours = jax.jit(lambda state, given: called(nnx.merge(graph, state), **given))(state, arrays)
    with torch.no_grad():
        theirs = called(reference, **inputs)
    if not isinstance(theirs, dict):
        ours, theirs = {"output": ours}, {"output": theirs}
    if missing := sorted({*theirs} ^ {*ours}):
        return {
            "outcome": "different",
            "kind": "outputs",
            "reason": f"one side alone has {missing}",
        }
    error = max(_error(np.asarray(ours[name]), theirs[name].numpy()) for name in theirs)
    return {"outcome": "equal" if error <= SCREEN else "different", "error": error}


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value."""
    if ours.shape != theirs.shape:
        return float("inf")
    kind = np.result_type(theirs.dtype, np.float64)
    ours, theirs = ours.astype(kind), theirs.astype(kind)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    if same.all():
        return 0.0
    scale = float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0))
    difference = float(np.abs(ours - theirs)[~same].max())
    return difference / scale if scale and np.isfinite(difference) else float("inf")


def _proof(
    found: Translation,
    reference: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    dynamic: Any,
) -> Row:
    begun = time.perf_counter()
    result = prove(found, reference, inputs, dynamic=dynamic or None)
    row: Row = {
        "outcome": str(result.verdict.name),
        "proof_seconds": time.perf_counter() - begun,
        "tensors": len(result.tensors),
    }
    if result.worst is not None:
        row["fraction"] = float(result.worst.fraction)
        row["worst"] = result.worst.name
    if result.reasons:
        row |= {"kind": result.reasons[0].kind, "reason": str(result.reasons[0])[:300]}
    return row


def _child(name: str, level: str, queue: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GIB * GIB, LIMIT_GIB * GIB))
    try:
        row = measured(name, level)
    except MemoryError:
        row = {"type": name, "level": level, "outcome": "error", "kind": "memory"}
    queue.put(row)


# --- all of them ----------------------------------------------------------------------------


def run(names: Iterable[str], level: str, rows: Path) -> None:
    """Append a row for each type that has none yet."""
    done = {row["type"] for row in read(rows) if row["level"] == level}
    context = multiprocessing.get_context("fork")  # what is imported here is there at once
    for name in names:
        if name in done:
            continue
        begun = time.perf_counter()
        queue = context.SimpleQueue()
        process = context.Process(target=_child, args=(name, level, queue))
        process.start()
        process.join(SECONDS[level])
        row: Row = {"type": name, "level": level, "outcome": "error"}
        if process.is_alive():
            process.kill()
            process.join()
            row |= {"kind": "time", "reason": f"longer than {SECONDS[level]} seconds"}
        elif queue.empty():
            row |= {"kind": "killed", "reason": f"ended with {process.exitcode}"}
        else:
            row = queue.get()
        row["seconds"] = time.perf_counter() - begun
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, row["outcome"], row.get("kind", ""), row.get("reason", "")[:150], flush=True)


def read(rows: Path) -> list[Row]:
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def summary(rows: Iterable[Row]) -> str:
    """Return the counts of outcomes, and the types that fail, grouped by reason."""
    rows = list(rows)
    lines = [
        f"{len(rows)} types",
        *(f"  {n} {o}" for o, n in Counter(r["outcome"] for r in rows).items()),
    ]
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] in (*WORKED, "not built"):
            continue
        operators = row.get("operators") or [row.get("reason", "")[:110]]
        for operator in operators:
            group = f"{row['outcome']}, {row.get('kind', '')}: {operator}"
            groups.setdefault(group, []).append(row["type"])
    for group, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(names)} {group}: {', '.join(names)}")
    return "\n".join(lines)


def cut_down(rows: Iterable[Row]) -> dict[str, Any]:
    """Return one row a type, a proof before a comparison, and how many types were built at all."""
    best: dict[str, Row] = {}
    built: dict[str, bool] = {}
    for row in rows:
        name, is_built = row["type"], row["outcome"] != "not built"
        built[name] = built.get(name, False) or is_built
        levels = [*SECONDS]
        is_better = name not in best or levels.index(row["level"]) >= levels.index(
            best[name]["level"]
        )
        if row["level"] != "built" and is_built and is_better:
            best[name] = row
    return {
        "date": time.strftime("%Y-%m-%d"),
        "transformers": transformers.__version__,
        "types": len(small_transformers.types()),
        "tried": len(built),
        "built": sum(built.values()),
        "columns": COLUMNS,
        "rows": [[row.get(column) for column in COLUMNS] for _, row in sorted(best.items())],
    }


def _ready() -> None:
    """Import what every process needs, without a thread or a device that a fork would lose."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    small = small_transformers.build(small_transformers.types()["bert"])
    torch.export.export(small.model, (), dict(small.inputs), strict=False).run_decompositions({})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.set_defaults(level="proof")
    for level in ("forward", "built"):
        parser.add_argument(f"--{level}", dest="level", action="store_const", const=level)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=Path("translated_models.jsonl"))
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    names = given.names or list(small_transformers.types())
    if unknown := {*names} - {*small_transformers.types()}:
        parser.error(f"NAME: expected model types of transformers, got {', '.join(unknown)}")
    if given.draw:
        names = random.Random(given.seed).sample(names, min(given.draw, len(names)))
    if given.keep:
        keep("translated_models", cut_down(read(given.rows)))
    else:
        _ready()
        run(names, given.level, given.rows)
    print(summary(read(given.rows)))


if __name__ == "__main__":
    main()
