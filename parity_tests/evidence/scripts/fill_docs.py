"""Write the tables of README and docs/, and the plot, from the evidence.

    python parity_tests/evidence/scripts/fill_docs.py

The evidence lies in ../data: *.json are runs of `jax-attn verify`, profile/power.json and
profile/calibration.json of its kill matrix and calibration, all cut down by reduce.py; bench/ holds
runs of `jax-attn bench --output`, bench/cached/ those of its decode preset, bench/half/ those in 16
bits; the rest of profile/ is written by the scripts beside this one: blocked.json by parts.py, and
each other by its namesake.
"""

import json
import re
from collections.abc import Mapping

import targets
from bench_tables import (
    AVX2,
    CACHED,
    HALF,
    PLOT,
    ROOT,
    SHARDING,
    bench,
    decode,
    half,
    kept,
    other,
    plotted,
    sharding,
    speed,
    speed_in_short,
)
from measuring import DATA, PROFILE

from jax_attn.bench.record import Record
from jax_attn.bench.results import plot
from jax_attn.parity.judge.budget import RUNS
from jax_attn.selfcheck.calibration.report import WITHOUT_CAUSE
from jax_attn.selfcheck.matrix.rows import published

REFERENCE = "docs/reference"
PAGES = ("README.md", *(f"{REFERENCE}/{name}.md" for name in ("evidence", "speed", "planted-bugs")))
FILES = PROFILE / "files.json"
CHECK_COST = PROFILE / "check_cost.json"
VERDICT_TIMES = PROFILE / "verdict_times.json"
MINILM = PROFILE / "minilm.json"
WHOLE_MODELS = PROFILE / "whole_models.json"
POWER = PROFILE / "power.json"
CALIBRATION = PROFILE / "calibration.json"
TRAINING, CURVES = PROFILE / "training.json", PROFILE / "training.svg"
SHOWN = (
    "weights_mha-float32-causal",
    "fused_mha-bfloat16-none",
    "masked_mha-float32-empty_row",
    "mqa-float16-",
    "plain_mha/pipeline-float32-none",
    "torch_mha-float64-",
    "gqa/softcap-bfloat16-bias",
    "gqa/cached-bfloat16-sliding",
    "gqa-float32-none-prime-emulated",
)

# Runner on these operands alone: 1.00 at 24 to 70 terms, 1.20 at 512, 1.55 at 4096.
WHY = (
    "Where embed_dim is 512 (seed002, seed003), the median is above 1.1: XLA:CPU adds the terms of "
    "a product in one long chain, while torch's MKL keeps several; at 24 to 70 terms it makes no "
    "difference. "
    "The largest ratios are of gradients of biases. These are sums of few rows, and the gradient "
    "of a key bias is zero in theory, so that both sides hold only rounding."
)


def row(*cells: object) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> list[str]:
    return [row(*cells), "|---" * len(cells) + "|"]


def cases(evidence: dict) -> str:
    """The first case of each kind in `SHOWN`, and the summary."""
    rows = head("case", "level", "verdict", "worst tensor", "error/budget", "ours/torch's")
    for start in SHOWN:
        name, backend, level, verdict, worst, fraction, ratio = next(
            case for case in evidence["cases"] if case[0].startswith(start)
        )
        shown = f"{ratio:.2f}" if ratio is not None and level == "measured" else "–"
        rows.append(row(name, f"{backend} {level}", verdict, worst, f"{fraction:.2f}", shown))
    return "\n".join([*rows, "", f"{counted(evidence)}, on {where(evidence['environment'])}."])


def counted(evidence: dict) -> str:
    """How many cases have each verdict."""
    counts = evidence["summary"]
    return ", ".join(f"{counts[key]} {key}" for key in ("pass", "fail", "inconclusive"))


def where(at: dict) -> str:
    """The machine and the versions of a run's environment."""
    versions = ", ".join(f"{k} {at['packages'][k]}" for k in ("jax", "flax", "torch"))
    return f"{at['processor']}, {at['cores']} cores, Python {at['python']}, {versions}"


def compatibility(evidence: dict, machine: str) -> list[str]:
    """What one run measured, at which level; machine: what the table calls the machine."""
    levels: dict[tuple[str, str], int] = {}
    for _, backend, level, *_ in evidence["cases"]:
        levels[backend, level] = levels.get((backend, level), 0) + 1
    kernel = ", ".join(evidence["kernels"])
    rows = []
    for (backend, level), n in levels.items():
        verdicts = {c[3] for c in evidence["cases"] if (c[1], c[2]) == (backend, level)}
        outcome = "all pass" if verdicts == {"PASS"} else ", ".join(sorted(verdicts))
        rows.append(row(backend.upper(), level, f"{n} cases, {kernel} kernel: {outcome}", machine))
    without_verdict: dict[tuple[str, str, str], list[str]] = {}
    for one in evidence["compiled"]:
        by = one.get("compiler") or machine
        without_verdict.setdefault((one["level"], one["target"], by), []).append(one["design"])
    for (level, target, by), names in without_verdict.items():
        if level == "compiled":
            kernels = sorted({n.removeprefix("kernel ") for n in names if n.startswith("kernel ")})
            designs = sorted({n for n in names if not n.startswith("kernel ")})
            every = ["every design"] if designs == sorted(published()) else designs
            named = (name.partition(", ") for name in kernels)
            cut = [f"`{kernel}`" + (f" on {mesh}" if mesh else "") for kernel, _, mesh in named]
            of = ", ".join([*every, *cut])
            what = f"{len(names)} programs accepted: forward and gradient of {of}"
            rows.append(row("TPU", "compiled, not run", what, f"{target}, {by}"))
        elif level == "refused":
            what = f"{len(names)} cases that the {kernel} kernel cannot serve"
            rows.append(row(target.upper(), "refused, no verdict", what, machine))
        else:
            what = f"{len(names)} programs: {', '.join(sorted(set(names)))}"
            rows.append(row(target.upper(), level, what, machine))
    return rows


def measured(runs: dict[str, dict]) -> str:
    """The compatibility table of every run."""
    machines = dict.fromkeys(where(run["environment"]) for run in runs.values())
    names = {machine: chr(ord("A") + i) for i, machine in enumerate(machines)}
    rows = head("backend", "level", "what", "where")
    for run in runs.values():
        rows += compatibility(run, names[where(run["environment"])])
    rows.append(row("GPU", "not measured yet", "–", "–"))
    return "\n".join([*rows, "", *(f"- {name}: {machine}" for machine, name in names.items())])


def accuracy(evidence: dict) -> str:
    """Our float32 error over torch's own, by shape."""
    rows = head("shape", "median", "worst", "tensors")
    for shape, r in evidence["summary"]["float32_error_over_torch"].items():
        rows.append(row(shape, f"{r['median']:.2f}", f"{r['worst']:.2f}", r["tensors"]))
    return "\n".join([*rows, "", f"On {where(evidence['environment'])}. {WHY}"])


def files(profile: dict) -> str:
    """How fast a big checkpoint is read, and what it takes beyond what is kept."""
    labels = {
        "safetensors": "`safetensors` itself",
        "mapping": "`load_checkpoint`, every tensor",
        "load": "`load`, through a table",
    }
    rows = head("read into memory", "GiB/s", "of safetensors", "MiB beyond what is kept")
    for name, label in labels.items():
        way = profile["read"][name]
        rate, share = f"{way['gib_per_second']:.2f}", f"{way['of_safetensors']:.2f}"
        rows.append(row(label, rate, share, f"{way['beyond_mib']:.0f}"))
    return "\n".join(
        [
            f"{profile['gib']:.1f} GiB in shards, on {where(profile['environment'])}: medians of "
            f"{profile['rounds']} interleaved rounds, each ratio within one round, by "
            "`parity_tests/evidence/scripts/files.py`. The targets are at least 0.7 of "
            f"safetensors and at most {profile['bound_mib']:.0f} MiB beyond what is kept.",
            "",
            *rows,
        ]
    )


def check_cost(profile: dict) -> str:
    """Time and memory of a check, by the model's size and by the length of its input."""
    what = ["B × T", "seconds", "GiB beside the models", "one float64 run of torch, seconds"]
    rows = head("parameters", *what)
    for check in sorted(profile["checks"], key=lambda c: (c["parameters"], c["B, T"])):
        B, T = check["B, T"]
        figures = (check["seconds"], check["GiB above the models"])
        shown = (f"{x:.3g}" for x in (*figures, check["one run in float64, seconds"]))
        rows.append(row(f"{check['parameters'] / 1e6:.1f} million", f"{B} × {T}", *shown))
    by = "`parity_tests/evidence/scripts/check_cost.py`"
    return "\n".join([f"By {by}, on {where(profile['environment'])}.", "", *rows])


def verdict_times(profile: dict) -> str:
    """How long a verdict takes, and which stages of a check take the processor's time."""
    figures = dict(profile["figures"])
    parts = figures.pop("stages", {})
    rows = head("what", "measured")
    for name, figure in figures.items():
        label = f"`{name}`" if name.startswith(("jax-attn", "pytest")) else name
        rows.append(row(label, "; ".join(f"{what}: {x:.3g}" for what, x in figure.items())))
    if parts:
        whole = sum(parts.values())
        shares = ", ".join(f"{name} {x / whole:.0%}" for name, x in parts.items())
        rows.append(row("processor time of the whole model's check, by stage", shares))
    by = "`parity_tests/evidence/scripts/verdict_times.py`"
    of = f"medians of {profile['rounds']} runs, each in a process of its own"
    return "\n".join([f"By {by}, {of}, on {where(profile['environment'])}.", "", *rows])


def whole_models(profile: dict) -> str:
    """What `jax-attn verify` of a whole model costs, and its verdicts."""
    rows = head("checkpoint", "GB", "minutes", "GiB", "verdicts")
    for name, run in profile["rows"].items():
        figures = (run["GB of the file"], run["seconds"] / 60, run["GiB"])
        verdicts = "<br>".join(f"{what}: {v}" for what, v in run["verdicts"].items())
        rows.append(row(name, *(f"{x:.3g}" for x in figures), verdicts))
    by = "`parity_tests/evidence/scripts/whole_models.py`"
    return "\n".join([f"By {by}, on {where(profile['environment'])}.", "", *rows])


def minilm(profile: dict) -> str:
    """What was compared of the sentence encoder, and how fast both sides are."""
    compared, timed = profile["compared"], profile["throughput"]
    ranked, returned = compared["rankings"], profile["back to torch"]
    rate, theirs = timed["sentences a second"], compared["torch's largest error"]
    return (
        f"By `parity_tests/evidence/scripts/minilm.py`, on {where(profile['environment'])}:\n\n"
        f"- {compared['sentences']} sentences of {compared['tokens'][0]} to "
        f"{compared['tokens'][1]} tokens in padded batches: all {compared['numbers']:,} numbers "
        f"{', '.join(compared['verdicts'])} against the float64 oracle. The largest error is "
        f"{compared['largest error']:.1e} ({compared['worst error over budget']:.2f} of its "
        f"budget); torch's is {theirs:.1e}.\n"
        f"- The first {ranked['top']} neighbours of {ranked['same_top']} of "
        f"{compared['sentences']} sentences are in torch's order. Over all pairs of neighbours, "
        f"{ranked['swapped']} are swapped, {ranked['unexplained']} of them by more than the budget "
        "allows.\n"
        f"- Every gradient of a small batch: {profile['gradients']['verdict']}.\n"
        f"- {returned['the same']} of {returned['tensors']} tensors return to torch bit for bit.\n"
        f"- Sentences per second with {timed['torch threads']} threads: torch {rate['torch']:.0f}, "
        f"the jitted port {rate['port']:.0f} ({timed['port over torch']:.2f} of torch)."
    )


def training(profile: dict) -> str:
    """How much of its budget each free run takes, and the curves."""
    rows = head("run", "loss", "loss/budget", "parameters/budget", "updates/budget")
    for name, run in profile["runs"].items():
        first, last = run["loss"]
        part = run["largest fraction of budget"]
        parts = (part[k] for k in ("loss", "parameters", "updates from identical gradients"))
        figures = (f"{fraction:.2f}" for fraction in parts)
        rows.append(row(f"{name} ({run['verdict']})", f"{first:.2f} → {last:.2f}", *figures))
    return "\n".join(
        [
            f"{profile['steps']} steps on the text of the LICENSE, on "
            f"{where(profile['environment'])}, by `parity_tests/evidence/scripts/training.py`. The "
            f"budget is of {profile['perturbed']} perturbed runs; `check_training` makes {RUNS}, "
            "which about halves its budget. The table has the largest part of the budget.",
            "",
            *rows,
            "",
            f"![loss of torch and of optax, and how far both are from float64]({beside(CURVES)})",
        ]
    )


def power(profile: dict) -> str:
    """How many planted bugs were killed, and each with its own row."""
    counts, weakest = profile["summary"], profile["summary"]["weakest"]
    lines = [
        f"By `jax-attn power`, on {where(profile['environment'])}: {counts['tried']} planted bugs, "
        f"{counts['trials']:,} trials on {counts['rows']} cases, {counts['survived']} survive. "
        f"{counts['by_their_own_row']} bugs are killed by the case designed for them. The "
        f"weakest kill is of the bug “{weakest['bug']}” in `{weakest['case']}`, with an error of "
        f"{weakest['times']:.3g} times the budget.",
        "",
        *head("planted bug", "case designed for it", "error/budget", "detected by, of claimed"),
    ]
    for bug, rows, times, killed, claimed in profile["bugs"]:
        over = "–" if times is None else f"{times:.2g}"
        lines.append(row(bug, "<br>".join(rows), over, f"{killed}/{claimed}"))
    return "\n".join(lines)


def calibration(profile: dict) -> str:
    """How many correct configurations failed, and how much of the budget they take."""
    groups = dict(sorted(profile["groups"].items(), key=lambda item: (item[0] == "all", item[0])))
    whole = groups["all"]
    rows = head("precision, kind", "drawn", "pass", "inconclusive", "fail", "largest error/budget")
    for name, group in groups.items():
        counts = [group[k] for k in ("configurations", "pass", "inconclusive", "fail")]
        most = max(gate["largest"] for gate in group["fractions"].values())
        rows.append(row(name, *counts, f"{most:.2f}"))
    planted = head("planted in some of them, and failed", "float64, float32", "lower precisions")
    bugs = dict.fromkeys(name.rpartition(", ")[0] for name in profile["power"])
    for bug in bugs:
        cells = []
        for fine in (True, False):
            trials = [
                kills
                for name, kills in profile["power"].items()
                if name.startswith(f"{bug}, ") and name.endswith(("float64", "float32")) == fine
            ]
            cells.append(" of ".join(str(sum(t[k] for t in trials)) for k in ("killed", "tried")))
        planted.append(row(bug, *cells))
    inconclusive = profile["inconclusive"]
    passed = inconclusive.get(WITHOUT_CAUSE, {})
    reasons = "; ".join(
        f"{name} {count}"
        + (f", of which {passed[name]} pass in a finer precision" if name in passed else "")
        for name, count in inconclusive["reasons"].items()
    )
    return "\n".join(
        [
            f"By `jax-attn calibrate`, on {where(profile['environment'])}: of "
            f"{whole['configurations']:,} correct ports **{whole['fail']} fail** and "
            f"{whole['inconclusive']} ({whole['inconclusive'] / whole['configurations']:.1%}) are "
            f"INCONCLUSIVE ({reasons}).",
            "",
            *rows,
            "",
            *planted,
        ]
    )


def status(runs: dict[str, dict], benchmarks: dict[str, Record], cached: dict[str, Record]) -> str:
    """What is measured and what misses its target, in a few lines."""
    evidence = next(iter(runs.values()))
    kinds = {(case[1], case[2]) for case in evidence["cases"]}
    by_kind = {
        kind: [case[3] for case in evidence["cases"] if (case[1], case[2]) == kind]
        for kind in sorted(kinds)
    }
    rows = head("what", "outcome")
    for (backend, level), verdicts in by_kind.items():
        passed = f"{verdicts.count('PASS')} of {len(verdicts)} cases pass"
        rows.append(row(f"the built-in matrix on {backend.upper()}, {level}", passed))
    compiled = dict.fromkeys(
        one["target"].partition(" (")[0]
        for one in evidence["compiled"]
        if one["level"] == "compiled"
    )
    rows.append(row(f"{', '.join(compiled)}", "programs compiled, not run"))
    rows.append(row("GPU", "not measured yet"))
    whole = json.loads(CALIBRATION.read_text())["groups"]["all"]
    drawn = f"{whole['configurations']:,} correct ports, drawn at random"
    share = whole["inconclusive"] / whole["configurations"]
    rows.append(row(drawn, f"{whole['fail']} fail falsely, {share:.1%} are inconclusive"))
    killed = json.loads(POWER.read_text())["summary"]
    detected = f"{killed['tried'] - killed['survived']} are detected"
    rows.append(row(f"{killed['tried']} planted bugs", detected))
    rows += [row(*each) for each in speed_in_short(benchmarks, cached).items()]
    met = [t.met(benchmarks) for t in targets.TARGETS if t.holds is not None]
    met += [t.met(cached) for t in targets.DECODING]
    missed = len(met) - met.count("yes")
    rows.append(row(f"{len(met)} targets of speed and accuracy on CPU", f"**{missed} are missed**"))
    share = json.loads(FILES.read_text())["read"]["load"]["of_safetensors"]
    rows.append(row("reading a checkpoint", f"{share:.2f} of safetensors' own speed (target 0.7)"))
    return "\n".join([*rows, "", f"On {where(evidence['environment'])}."])


def beside(path) -> str:
    """The link to a file of the evidence, on a page of `REFERENCE`."""
    return f"../../{path.relative_to(ROOT)}"


def tables(
    runs: dict[str, dict],
    benchmarks: dict[str, Record] | None = None,
    cached: dict[str, Record] | None = None,
) -> dict[str, str]:
    """Every table, by name; runs of the bench as they are kept unless given."""
    benchmarks = kept() if benchmarks is None else benchmarks
    cached = kept(CACHED) if cached is None else cached
    evidence = next(iter(runs.values()))
    return {
        "status": status(runs, benchmarks, cached),
        "cases": cases(evidence),
        "measured": measured(runs),
        "accuracy": accuracy(evidence),
        "bench": bench(benchmarks),
        "half": half(kept(HALF)),
        "other": other(),
        "avx2": other(AVX2),
        "decode": decode(cached),
        "sharding": sharding(json.loads(SHARDING.read_text())),
        "speed": speed(benchmarks, cached),
        "files": files(json.loads(FILES.read_text())),
        "check_cost": check_cost(json.loads(CHECK_COST.read_text())),
        "verdict_times": verdict_times(json.loads(VERDICT_TIMES.read_text())),
        "minilm": minilm(json.loads(MINILM.read_text())),
        "whole_models": whole_models(json.loads(WHOLE_MODELS.read_text())),
        "training": training(json.loads(TRAINING.read_text())),
        "power": power(json.loads(POWER.read_text())),
        "calibration": calibration(json.loads(CALIBRATION.read_text())),
    }


def filled(pages: Mapping[str, str], tables: Mapping[str, str]) -> dict[str, str]:
    """The pages, by name, with every table that they have a place for."""
    made = dict(pages)
    for name, text in tables.items():
        block = f"<!-- {name} -->\n{text}\n<!-- /{name} -->"
        marked = re.compile(rf"<!-- {name} -->(?:\n.*?<!-- /{name} -->)?", re.DOTALL)
        made = {
            page: marked.sub(lambda _, block=block: block, old, count=1)
            for page, old in made.items()
        }
    return made


def evidence() -> dict[str, dict]:
    """Every run that was kept, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))}


if __name__ == "__main__":
    if runs_of_bench := kept():  # first: pages without their plot would be half-written
        plot.save(plotted(runs_of_bench), PLOT)
    pages = {name: (ROOT / name).read_text() for name in PAGES}
    for page, text in filled(pages, tables(evidence())).items():
        (ROOT / page).write_text(text)
