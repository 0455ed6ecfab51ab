"""Write the README's tables and its plot from the evidence.

    python parity_tests/evidence/scripts/readme.py

The evidence lies in ../data: *.json are runs of `jax-attn verify`, profile/power.json and
profile/calibration.json of its kill matrix and calibration, all cut down by reduce.py; bench/ holds
runs of `jax-attn bench --output`, bench/cached/ those of its decode preset; the rest of profile/ is
written by the scripts beside this one: blocked.json by parts.py, and each other by its namesake.
"""

import json
import re

from measuring import DATA, PROFILE
from readme_bench import CACHED, PLOT, README, bench, benchmarks, decode, plotted

from jax_attn.bench.record import Record
from jax_attn.bench.results import plot
from jax_attn.parity.calibration.report import WITHOUT_CAUSE
from jax_attn.parity.judge.budget import RUNS
from jax_attn.parity.matrix.rows import published

FILES = PROFILE / "files.json"
MINILM = PROFILE / "minilm.json"
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
    "Above 1 stand the shapes with embed_dim 512 (seed002, seed003): XLA:CPU adds a product's "
    "terms in one long chain where torch's MKL keeps several; at 24 to 70 terms it makes no "
    "difference. The worst are biases' gradients: sums of few rows, and a key bias's, zero in "
    "theory, of which both sides have only rounding."
)


def block(name: str, text: str) -> str:
    return f"<!-- {name} -->\n{text}\n<!-- /{name} -->"


def table(evidence: dict) -> str:
    """The first case of each kind in `SHOWN`, and the summary."""
    rows = [
        "| case | level | verdict | worst tensor | error/budget | ours/torch's |",
        "|---" * 6 + "|",
    ]
    for start in SHOWN:
        name, backend, level, verdict, worst, fraction, ratio = next(
            case for case in evidence["cases"] if case[0].startswith(start)
        )
        shown = f"{ratio:.2f}" if ratio is not None and level == "measured" else "–"
        cells = (name, f"{backend} {level}", verdict, worst, f"{fraction:.2f}", shown)
        rows.append(f"| {' | '.join(cells)} |")
    counts = evidence["summary"]
    rows += [
        "",
        f"**{counts['pass']} pass, {counts['fail']} fail, {counts['inconclusive']} inconclusive.**",
    ]
    return "\n".join(rows)


def where(at: dict) -> str:
    """The machine and the versions of a run's environment."""
    versions = ", ".join(f"{k} {at['packages'][k]}" for k in ("jax", "flax", "torch"))
    return f"{at['processor']}, {at['cores']} cores, Python {at['python']}, {versions}"


def compatibility(evidence: dict) -> list[str]:
    """What one run measured, at which level, and where."""
    at = evidence["environment"]
    levels: dict[tuple[str, str], int] = {}
    for _, backend, level, *_ in evidence["cases"]:
        levels[backend, level] = levels.get((backend, level), 0) + 1
    kernel = ", ".join(evidence["kernels"])
    machine = where(at)
    rows = []
    for (backend, level), n in levels.items():
        verdicts = {c[3] for c in evidence["cases"] if (c[1], c[2]) == (backend, level)}
        outcome = "all pass" if verdicts == {"PASS"} else ", ".join(sorted(verdicts))
        what = f"{n} cases, {kernel} kernel, {outcome}"
        rows.append(f"| {backend.upper()} | {level} | {what} | {machine} |")
    without_verdict: dict[tuple[str, str, str], list[str]] = {}
    for row in evidence["compiled"]:
        by = row.get("compiler") or machine
        without_verdict.setdefault((row["level"], row["target"], by), []).append(row["design"])
    for (level, target, by), names in without_verdict.items():
        if level == "compiled":
            kernels = sorted({n.removeprefix("kernel ") for n in names if n.startswith("kernel ")})
            designs = sorted({n for n in names if not n.startswith("kernel ")})
            every = ["every design"] if designs == sorted(published()) else designs
            of = ", ".join([*every, *(f"`{name}`" for name in kernels)])
            what = f"{len(names)} programs accepted: forward and gradient of {of}"
            rows.append(f"| TPU | compiled, not run | {what} | {target}, {by} |")
        elif level == "refused":
            what = f"{len(names)} cases that the {kernel} kernel cannot serve"
            rows.append(f"| {target.upper()} | refused, no verdict | {what} | {machine} |")
        else:
            what = f"{len(names)} programs: {', '.join(sorted(set(names)))}"
            rows.append(f"| {target} | {level} | {what} | {machine} |")
    return rows


def measured(runs: dict[str, dict]) -> str:
    """The compatibility table of every run, and the float32 accuracy of the first."""
    rows = ["| backend | level | what | where |", "|---|---|---|---|"]
    for run in runs.values():
        rows += compatibility(run)
    rows.append("| GPU | not yet measured | – | – |")
    evidence = next(iter(runs.values()))
    rows += ["", "Our float32 RMS error over torch's own, both against the oracle:", ""]
    rows += ["| shape | median | worst | tensors |", "|---|---|---|---|"]
    for shape, r in evidence["summary"]["float32_error_over_torch"].items():
        rows.append(f"| {shape} | {r['median']:.2f} | {r['worst']:.2f} | {r['tensors']} |")
    rows += ["", WHY]
    return "\n".join(rows)


def files(profile: dict) -> str:
    """How fast a big checkpoint is read, and what it takes beyond what is kept."""
    labels = {
        "safetensors": "`safetensors` itself",
        "mapping": "`load_checkpoint`, every tensor",
        "load": "`load`, through a table",
    }
    rows = ["| read into memory | GiB/s | of safetensors | MiB beyond what is kept |"]
    rows.append("|---" * 4 + "|")
    for name, label in labels.items():
        way = profile["read"][name]
        figures = way["gib_per_second"], way["of_safetensors"], way["beyond_mib"]
        rows.append(f"| {label} | {figures[0]:.2f} | {figures[1]:.2f} | {figures[2]:.0f} |")
    return "\n".join(
        [
            f"By `parity_tests/evidence/scripts/files.py`: {profile['gib']:.1f} GiB in shards, "
            f"medians of {profile['rounds']} interleaved rounds, the ratio of each round's own, "
            f"{where(profile['environment'])} (targets: at "
            f"least 0.7 of safetensors, at most {profile['bound_mib']:.0f} MiB beyond):",
            "",
            *rows,
        ]
    )


def minilm(profile: dict) -> str:
    """What was compared of the sentence encoder, and how fast both sides are."""
    compared, timed = profile["compared"], profile["throughput"]
    ranked, returned = compared["rankings"], profile["back to torch"]
    rate, theirs = timed["sentences a second"], compared["torch's largest error"]
    return (
        f"By `python parity_tests/evidence/scripts/minilm.py`, {where(profile['environment'])}: "
        f"{compared['sentences']} sentences of {compared['tokens'][0]} to {compared['tokens'][1]} "
        f"tokens in padded batches, all {compared['numbers']:,} numbers "
        f"{', '.join(compared['verdicts'])} against the float64 oracle (at most "
        f"{compared['worst error over budget']:.2f} of the budget; largest error "
        f"{compared['largest error']:.1e}, torch's {theirs:.1e}); "
        f"the first {ranked['top']} neighbours of {ranked['same_top']} of "
        f"{compared['sentences']} in torch's order, and of all pairs of neighbours "
        f"{ranked['swapped']} swapped, {ranked['unexplained']} by more than the budget allows; "
        f"every gradient of a small batch {profile['gradients']['verdict']}; "
        f"{returned['the same']} of {returned['tensors']} tensors back in torch bit for bit. "
        f"Sentences a second, {timed['torch threads']} threads: torch {rate['torch']:.0f}, "
        f"jitted port {rate['port']:.0f} ({timed['port over torch']:.2f})."
    )


def training(profile: dict) -> str:
    """How much of its budget each free run takes, and the curves."""
    rows = ["| run | loss | loss/budget | parameters/budget | updates/budget |"]
    rows.append("|---" * 5 + "|")
    for name, run in profile["runs"].items():
        first, last = run["loss"]
        part = run["largest fraction of budget"]
        parts = (part[k] for k in ("loss", "parameters", "updates from identical gradients"))
        figures = " | ".join(f"{fraction:.2f}" for fraction in parts)
        rows.append(f"| {name} ({run['verdict']}) | {first:.2f} → {last:.2f} | {figures} |")
    return "\n".join(
        [
            f"By `parity_tests/evidence/scripts/training.py`, {where(profile['environment'])}: "
            f"{profile['steps']} steps on the text of the LICENSE, largest part of the budget "
            f"(of {profile['perturbed']} perturbed runs; `check_training` makes {RUNS}, and its "
            "budget is about half as wide):",
            "",
            *rows,
            "",
            f"![loss of torch and of optax, and how far both are from float64]"
            f"({CURVES.relative_to(README.parent)})",
        ]
    )


def power(profile: dict) -> str:
    """How many planted bugs were killed, and each with its own row."""
    counts, weakest = profile["summary"], profile["summary"]["weakest"]
    lines = [
        f"By `jax-attn power`, {where(profile['environment'])}: {counts['tried']} planted "
        f"bugs, {counts['trials']:,} trials on {counts['rows']} rows, {counts['survived']} "
        f"survived; {counts['by_their_own_row']} bugs are killed by the row made to catch them. "
        f"The weakest kill: {weakest['bug']} in `{weakest['case']}`, {weakest['times']:.3g} times "
        "the budget.",
        "",
        "<details><summary>Every planted bug</summary>",
        "",
        "| planted bug | the row made to catch it | over its budget | killed of claimed |",
        "|---" * 4 + "|",
    ]
    for bug, rows, times, killed, claimed in profile["bugs"]:
        over = "–" if times is None else f"{times:.2g}"
        lines.append(f"| {bug} | {', '.join(rows)} | {over} | {killed}/{claimed} |")
    return "\n".join([*lines, "", "</details>"])


def calibration(profile: dict) -> str:
    """How many correct configurations failed, and how much of the budget they take."""
    groups = dict(sorted(profile["groups"].items(), key=lambda item: (item[0] == "all", item[0])))
    whole = groups["all"]
    rows = ["| precision, kind | drawn | pass | inconclusive | fail | largest part of the budget |"]
    rows.append("|---" * 6 + "|")
    for name, group in groups.items():
        counts = [group[k] for k in ("configurations", "pass", "inconclusive", "fail")]
        most = max(gate["largest"] for gate in group["fractions"].values())
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {most:.2f} |")
    planted = ["| planted in some of them, and failed | float64, float32 | lower precisions |"]
    planted.append("|---" * 3 + "|")
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
        planted.append(f"| {bug} | {' | '.join(cells)} |")
    planted += [
        "",
        "Most of those that live cannot be seen: where one key is live a softmax is 1 whatever its "
        "scores, and in bfloat16 probabilities in bfloat16 are no bug.",
    ]
    share = whole["inconclusive"] / whole["configurations"]
    inconclusive = profile["inconclusive"]
    passed = inconclusive.get(WITHOUT_CAUSE, {})
    reasons = "; ".join(
        f"{name} {count}"
        + (f", of which {passed[name]} pass in a finer precision" if name in passed else "")
        for name, count in inconclusive["reasons"].items()
    )
    return "\n".join(
        [
            "By `jax-attn calibrate`, "
            f"{where(profile['environment'])}: of {whole['configurations']:,} correct ones "
            f"**{whole['fail']} fail**, {whole['inconclusive']} ({share:.1%}) are INCONCLUSIVE "
            f"({reasons}). Nearly all are of "
            "bfloat16 and of the unit that rounds to it, which hold fewer peaked scores too "
            "(`parity/calibration/draw.LIMITS`). The comparison alone is drawn for, not the "
            "canaries of `check`, which many of these inputs are rightly too blind for. Kinds: "
            "attention with its scores written out (core) and by the blocked kernel; pre-norm "
            "blocks by either (module); blocks whose attention is written out on both sides "
            "(eager), masked by finite constants, with bucketed biases, padding tokens, batch "
            "norms, gates and experts. `tf32` and `mxu` are emulated matrix units."
            + ("" if any("eager" in row for row in rows) else _FORMER),
            "",
            *rows,
            "",
            *planted,
        ]
    )


_FORMER = (
    " **This run is older than the eager blocks and than the present budgets: it holds for "
    "neither, and is to be repeated.**"
)


def written(
    readme: str, runs: dict[str, dict], benchmarks: dict[str, Record], cached: dict[str, Record]
) -> str:
    """The README with every table as the evidence has it."""
    texts = {
        "table": table(next(iter(runs.values()))),
        "bench": bench(benchmarks),
        "decode": decode(cached),
        "files": files(json.loads(FILES.read_text())),
        "minilm": minilm(json.loads(MINILM.read_text())),
        "training": training(json.loads(TRAINING.read_text())),
        "power": power(json.loads(POWER.read_text())),
        "calibration": calibration(json.loads(CALIBRATION.read_text())),
        "measured": measured(runs),
    }
    for name, text in texts.items():
        marked = rf"<!-- {name} -->(\n.*?<!-- /{name} -->)?"
        filled = block(name, text)
        readme = re.sub(marked, lambda _, filled=filled: filled, readme, count=1, flags=re.DOTALL)
    return readme


def evidence() -> dict[str, dict]:
    """Every run that was kept, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))}


if __name__ == "__main__":
    kept = benchmarks()
    if kept:  # first: a README without its plot would be half-written
        plot.save(plotted(kept), PLOT)
    README.write_text(written(README.read_text(), evidence(), kept, benchmarks(CACHED)))
