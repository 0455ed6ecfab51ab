"""What the docs say of profile/*.json: a function each, under its file's name."""

from collections import Counter

from measuring import PROFILE, SCRIPTS, beside, table, where

from jax_attn.bench.results import words
from jax_attn.parity.judge.budget import RUNS
from jax_attn.selfcheck.calibration.report import WITHOUT_CAUSE


def by(script: str, profile: dict, said: str = "") -> str:
    """Which script measured it, and where."""
    return f"By `{SCRIPTS}/{script}.py`, {said}on {where(profile['environment'])}"


def files(profile: dict) -> str:
    """How fast a big checkpoint is read, and what it takes beyond what is kept."""
    labels = {
        "safetensors": "`safetensors` itself",
        "mapping": "`load_checkpoint`, every tensor",
        "load": "`load`, through a table",
    }
    rows = []
    for name, label in labels.items():
        way = profile["read"][name]
        rate, share = f"{way['gib_per_second']:.2f}", f"{way['of_safetensors']:.2f}"
        rows.append((label, rate, share, f"{way['beyond_mib']:.0f}"))
    head = ("read into memory", "GiB/s", "of safetensors", "MiB beyond what is kept")
    return (
        f"{profile['gib']:.1f} GiB in shards, on {where(profile['environment'])}: medians of "
        f"{profile['rounds']} interleaved rounds, each ratio within one round, by "
        f"`{SCRIPTS}/files.py`. The targets are at least 0.7 of safetensors and at most "
        f"{profile['bound_mib']:.0f} MiB beyond what is kept.\n\n{table(head, rows)}"
    )


def check_cost(profile: dict) -> str:
    """Time and memory of a check, by the model's size and by the length of its input."""
    names = ("seconds", "GiB above the models", "one run in float64, seconds")
    rows = []
    for check in sorted(profile["checks"], key=lambda c: (c["parameters"], c["B, T"])):
        B, T = check["B, T"]
        size = f"{check['parameters'] / 1e6:.1f} million"
        rows.append((size, f"{B} × {T}", *(f"{check[name]:.3g}" for name in names)))
    what = ("seconds", "GiB beside the models", "one float64 run of torch, seconds")
    return f"{by('check_cost', profile)}.\n\n{table(('parameters', 'B × T', *what), rows)}"


def verdict_times(profile: dict) -> str:
    """How long a verdict takes, and which stages of a check take the processor's time."""
    return "\n\n".join(map(_verdict_times, profile["machines"]))


def _verdict_times(machine: dict) -> str:
    figures = dict(machine["figures"])
    parts, rows = figures.pop("stages", {}), []
    for name, figure in figures.items():
        label = f"`{name}`" if name.startswith(("jax-attn", "pytest")) else name
        rows.append((label, "; ".join(f"{what}: {x:.3g}" for what, x in figure.items())))
    if parts:
        whole = sum(parts.values())
        shares = ", ".join(f"{name} {x / whole:.0%}" for name, x in parts.items())
        rows.append(("processor time of the whole model's check, by stage", shares))
    of = f"medians of {machine['rounds']} runs, each in a process of its own, "
    return f"{by('verdict_times', machine, of)}.\n\n{table(('what', 'measured'), rows)}"


def whole_models(profile: dict) -> str:
    """What `jax-attn verify` of a whole model costs, and its verdicts."""
    rows = []
    for name, run in profile["rows"].items():
        figures = (run["GB of the file"], run["seconds"] / 60, run["GiB"])
        verdicts = "<br>".join(f"{what}: {v}" for what, v in run["verdicts"].items())
        rows.append((name, *(f"{x:.3g}" for x in figures), verdicts))
    head = ("checkpoint", "GB", "minutes", "GiB", "verdicts")
    return f"{by('whole_models', profile)}.\n\n{table(head, rows)}"


def minilm(profile: dict) -> str:
    """What was compared of the sentence encoder, and how fast both sides are."""
    compared, timed = profile["compared"], profile["throughput"]
    ranked, returned = compared["rankings"], profile["back to torch"]
    rate, theirs = timed["sentences a second"], compared["torch's largest error"]
    return (
        f"{by('minilm', profile)}:\n\n"
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
    rows = []
    for name, run in profile["runs"].items():
        first, last = run["loss"]
        part = run["largest fraction of budget"]
        parts = (part[k] for k in ("loss", "parameters", "updates from identical gradients"))
        figures = (f"{fraction:.2f}" for fraction in parts)
        rows.append((f"{name} ({run['verdict']})", f"{first:.2f} → {last:.2f}", *figures))
    head = ("run", "loss", "loss/budget", "parameters/budget", "updates/budget")
    curves = beside(PROFILE / "training.svg")
    return (
        f"{profile['steps']} steps on the text of the LICENSE, on "
        f"{where(profile['environment'])}, by `{SCRIPTS}/training.py`. The "
        f"budget is of {profile['perturbed']} perturbed runs; `check_training` makes {RUNS}, "
        "which about halves its budget. The table has the largest part of the budget.\n\n"
        f"{table(head, rows)}\n\n"
        f"![loss of torch and of optax, and how far both are from float64]({curves})"
    )


def power(profile: dict) -> str:
    """How many planted bugs were killed, and each with its own row."""
    counts, weakest = profile["summary"], profile["summary"]["weakest"]
    rows = [
        (bug, "<br>".join(own), "–" if times is None else f"{times:.2g}", f"{killed}/{claimed}")
        for bug, own, times, killed, claimed in profile["bugs"]
    ]
    head = ("planted bug", "case designed for it", "error/budget", "detected by, of claimed")
    return (
        f"By `jax-attn power`, on {where(profile['environment'])}: {counts['tried']} planted bugs, "
        f"{counts['trials']:,} trials on {counts['rows']} cases, {counts['survived']} survive. "
        f"{counts['by_their_own_row']} bugs are killed by the case designed for them. The "
        f"weakest kill is of the bug “{weakest['bug']}” in `{weakest['case']}`, with an error of "
        f"{weakest['times']:.3g} times the budget.\n\n{table(head, rows)}"
    )


def calibration(profile: dict) -> str:
    """How many correct configurations failed, and how much of the budget they take."""
    whole, drawn = profile["groups"]["all"], []
    for name, group in sorted(profile["groups"].items(), key=lambda g: (g[0] == "all", g[0])):
        counts = [group[k] for k in ("configurations", "pass", "inconclusive", "fail")]
        most = max(gate["largest"] for gate in group["fractions"].values())
        drawn.append((name, *counts, f"{most:.2f}"))
    killed: dict[str, list[Counter]] = {}  # of float64 and float32, and of lower precisions
    for name, trials in profile["power"].items():
        bug, _, precision = name.rpartition(", ")
        is_low = precision not in ("float64", "float32")
        killed.setdefault(bug, [Counter(), Counter()])[is_low].update(trials)
    planted = [
        (bug, *(f"{trials['killed']} of {trials['tried']}" for trials in each))
        for bug, each in killed.items()
    ]
    inconclusive = profile["inconclusive"]
    passed = inconclusive.get(WITHOUT_CAUSE, {})
    reasons = "; ".join(
        f"{name} {count}"
        + (f", of which {passed[name]} pass in a finer precision" if name in passed else "")
        for name, count in inconclusive["reasons"].items()
    )
    head = ("precision, kind", "drawn", "pass", "inconclusive", "fail", "largest error/budget")
    other_head = ("planted in some of them, and failed", "float64, float32", "lower precisions")
    return (
        f"By `jax-attn calibrate`, on {where(profile['environment'])}: of "
        f"{whole['configurations']:,} correct ports **{whole['fail']} fail** and "
        f"{whole['inconclusive']} ({whole['inconclusive'] / whole['configurations']:.1%}) are "
        f"INCONCLUSIVE ({reasons}).\n\n{table(head, drawn)}\n\n{table(other_head, planted)}"
    )


def sharding(profile: dict) -> str:
    """What cutting attention over devices costs, and what is sent."""
    rows = []
    for row in profile["rows"]:
        sends = [f"{count} {kind}" for kind, count in row["sent"].items()]
        what = f"{', '.join(sends)}: {words.size(row['bytes'])}" if sends else "nothing"
        figures = (f"{row['milliseconds']:.0f}", f"{row['over one device']:.2f}", what)
        rows.append((*(row[k] for k in ("heads", "pass", "mesh", "implementation")), *figures))
    head = ("heads", "pass", "mesh", "implementation", "ms", "over one device", "sent")
    at = profile["environment"]
    return (
        "Causal attention of 8 rows, 512 tokens and 8 heads of 64, float32, on eight CPU devices "
        f"that share {at['cores']} cores of {at['processor']}, by "
        f"`{SCRIPTS}/sharding.py`, with jax "
        f"{at['packages']['jax']}. The work and the cores are the same as on one device, so that "
        "a split that costs something takes more than 1.00 of its time. Less than 1.00 says that "
        f"one device does not keep all cores busy:\n\n{table(head, rows)}"
    )


def translated_models(profile: dict) -> str:
    """Which models of transformers were translated, at which level of evidence, and what fails."""
    found = [dict(zip(profile["columns"], row, strict=True)) for row in profile["rows"]]
    machine = f"{by('translated_models', profile)}, transformers {profile['transformers']}"
    counts = Counter((row["level"], row["outcome"]) for row in found)
    said = {"proof": "proof", "forward": "outputs only"}
    parts = [
        f"{machine}, {profile['date']}. transformers has {profile['types']} model types; "
        f"{profile['tried']} were tried, {profile['built']} of them could be built small and run "
        f"in torch, and {len(found)} were translated or refused:",
        table(
            ("level of evidence", "outcome", "types"),
            [(said[level], outcome, n) for (level, outcome), n in sorted(counts.items())],
        ),
    ]
    rows = []
    for row in found:
        if row["outcome"] not in ("PASS", "equal"):
            continue
        is_proof = row["level"] == "proof"
        figure = f"{row['fraction']:.2f}" if is_proof else f"{row['error']:.1e}"
        times = (f"{row[name]:.1f}" for name in ("export_seconds", "our_seconds"))
        sizes = ", ".join(row["varying"]) or "none"
        size = (f"{row['parameters']:,}", row["modules"], row["lines"])
        level = f"proof: {row['outcome']}" if is_proof else "outputs only"
        rows.append((f"`{row['type']}`", level, figure, *size, sizes, *times))
    head = ("type", "evidence", "error", "parameters", "modules", "lines", "sizes that vary")
    parts.append(table((*head, "s, torch.export", "s, the rest"), rows))
    failed = [
        (f"`{row['type']}`", said[row["level"]], row["outcome"], _one_line(row["reason"] or ""))
        for row in found
        if row["outcome"] not in ("PASS", "equal")
    ]
    parts += ["What does not pass:", table(("type", "level", "outcome", "reason"), failed)]
    fixed = [(f"`{r['type']}`", _one_line(r["fixed_because"])) for r in found if r["fixed_because"]]
    parts += ["Where a size could not vary:", table(("type", "reason"), fixed)]
    return "\n\n".join(parts)


def _one_line(reason: str) -> str:
    """Return a reason as it stands in a cell of a table."""
    return "`" + " ".join(reason.replace("|", "/").replace("`", "'").split())[:160] + "`"


PROFILES = (
    files,
    check_cost,
    verdict_times,
    minilm,
    whole_models,
    training,
    power,
    calibration,
    sharding,
    translated_models,
)
