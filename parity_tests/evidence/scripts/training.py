"""200 steps of two small tasks, eager torch against compiled optax: losses, parameters, a plot.

    python parity_tests/evidence/scripts/training.py [steps]

reads the LICENSE, trains the published sentence pipeline on its words under every optimizer and a
two-layer encoder on its characters, prints how much of its budget each takes and writes
profile/training.json and profile/training.svg. Leaves 1 where a verdict is not PASS.
"""

import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from flax import nnx
from measuring import PROFILE, keep
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop, lr_scheduler

from jax_attn import transfer
from jax_attn.parity.judge.budget import PRECISIONS, Budget
from jax_attn.parity.judge.result import Result
from jax_attn.selfcheck.matrix.ports import EmbeddedAttention
from jax_attn.selfcheck.training_bugs.encoder import ENCODER, TorchEncoder, draws, ported
from jax_attn.training.canaries import try_canaries
from jax_attn.training.judging import judge
from jax_attn.training.port_loop import PortLoop, PortTraining
from jax_attn.training.recipe import LOSSES, Recipe, with_loss
from jax_attn.training.reference_training import ReferenceTraining
from torch_ref import plain_mha

mpl.use("svg")
from matplotlib import pyplot as plt

TEXT = (Path(__file__).parents[3] / "LICENSE").read_text().lower()
STEPS, BATCHES, BATCH = 200, 20, 4
PROCESSES = 2
PERTURBED = 6  # runs; 16, as `check_training` makes, would take ten minutes
PLOTTED = (
    "pipeline, SGD",
    "pipeline, AdamW",
    "pipeline, Adagrad",
    "encoder, AdamW, warm-up, cosine, clip",
)
COLOURS = {"torch": "#444444", "optax": "#c1440e", "band": "#9db8d9"}


@dataclass(frozen=True)
class Task:
    """A module in both frameworks, and what it learns."""

    reference: torch.nn.Module
    port: nnx.Module
    layout: transfer.Layout
    batches: list[dict[str, np.ndarray]]


def on_tokens(module: Any, tokens: Any, **others: Any) -> Any:
    return module(tokens, **others)


def words(length: int = 12, vocabulary: int = 20) -> Task:
    """Tokenizer → embedding → attention, whose features are the scores of each next word."""
    counted = Counter(TEXT.split()).most_common(vocabulary - 1)
    number = {word: i for i, (word, _) in enumerate(counted, 1)}

    def tokenizer(sentence: str) -> list[int]:
        return [number.get(word, 0) for word in sentence.split()]

    text, rng = TEXT.split(), np.random.default_rng(0)
    batches = []
    for _ in range(BATCHES):
        starts = rng.integers(0, len(text) - length - 1, BATCH)
        rows = [
            plain_mha.encode_sentence(" ".join(text[i : i + length + 1]), tokenizer, length + 1)
            for i in starts
        ]
        tokens = np.stack([row.numpy() for row in rows])
        batches.append({"tokens": tokens[:, :-1], "target": tokens[:, 1:]})
    torch.manual_seed(0)
    reference = plain_mha.SentenceAttention(vocabulary, vocabulary, 4)
    port = EmbeddedAttention(vocabulary, vocabulary, 4, rngs=nnx.Rngs(0))
    transfer.load(port, reference.state_dict(), transfer.PLAIN_PIPELINE)
    return Task(reference, port, transfer.PLAIN_PIPELINE, batches)


def characters(length: int = 16, width: int = 16) -> Task:
    """A causal two-layer encoder, scores of each next character, dropout handed in."""
    known = sorted(set(TEXT))
    codes = np.array([known.index(c) for c in TEXT])
    rng, batches = np.random.default_rng(0), []
    for i in range(BATCHES):
        starts = rng.integers(0, len(codes) - length - 1, BATCH)
        rows = np.stack([codes[j : j + length + 1] for j in starts])
        keep = draws(i, BATCH, length, width)
        batches.append({"tokens": rows[:, :-1], "target": rows[:, 1:], "keep": keep})
    reference = TorchEncoder(len(known), width, 4, 2 * width, seed=0)
    return Task(reference, ported(reference), ENCODER, batches)


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    then = lr_scheduler.CosineAnnealingLR(optimizer, 180)
    return lr_scheduler.SequentialLR(optimizer, [first, then], [20])


def of(kind: type, *args: Any, **options: Any) -> Recipe:
    return Recipe(lambda module: kind(module.parameters(), *args, **options))


RUNS: dict[str, tuple[Any, Recipe]] = {
    "pipeline, SGD": (words, of(SGD, 0.1, momentum=0.9, nesterov=True)),
    "pipeline, Adam": (words, of(Adam, 3e-3)),
    "pipeline, AdamW": (words, of(AdamW, 3e-3)),
    "pipeline, NAdam": (words, of(NAdam, 3e-3)),
    "pipeline, RMSprop": (words, of(RMSprop, 1e-3)),
    "pipeline, Adagrad": (words, of(Adagrad, 0.02)),
    "encoder, AdamW, warm-up, cosine, clip": (
        characters,
        Recipe(lambda m: AdamW(m.parameters(), 3e-3), warm_up, clip_norm=1.0),
    ),
}


def trained(name: str, steps: int) -> tuple[Result, dict[str, Any]]:
    """One run: its result, its losses and their band."""
    make, recipe = RUNS[name]
    task, losses = make(), LOSSES["cross_entropy"]
    training = ReferenceTraining.of(
        task.reference,
        task.batches,
        recipe,
        steps,
        with_loss(on_tokens, losses[0]),
        "float32",
        layout=task.layout,
        port=task.port,
    )
    training = replace(training, perturbed_runs=PERTURBED)
    loop = PortLoop(task.port, with_loss(on_tokens, losses[1]), task.batches, "float32")
    port = PortTraining(loop, training.optax_like(task.port))
    result = judge(training, port, try_canaries(training), name=name)
    own, centre = training.free_runs.own, training.free_runs.exact
    curves = [run.losses for run in training.free_runs.perturbed]
    budget = Budget.of(centre.losses, curves, PRECISIONS["float32"])
    ours = port.free_run(steps).losses
    return result, {
        "float64": rounded(centre.losses, 7),
        "torch - float64": rounded(own.losses - centre.losses),
        "optax - float64": rounded(ours - centre.losses),
        "spread": rounded(np.sqrt(np.mean(np.square(np.array(curves) - centre.losses), 0))),
        "budget": rounded(budget.element),
    }


def rounded(numbers: np.ndarray, digits: int = 3) -> list[float]:
    return [float(f"{x:.{digits}g}") for x in numbers]


def summary(result: Result, losses: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What is kept of a result."""

    def most(start: str) -> float:
        return max(t.fraction for t in result.tensors if t.label.startswith(start))

    return {
        "verdict": str(result.verdict),
        "largest fraction of budget": {
            "loss": most("loss"),
            "parameters": most("moved"),
            "updates from identical gradients": most("update"),
            "gradients": most("grad"),
        },
        "loss": [losses["float64"][0], losses["float64"][-1]],
        "reasons": list(result.reasons),
        "notes": list(result.notes),
        "tensors": len(result.tensors),
        "seconds": seconds,
        "losses": losses,
    }


def plot(runs: dict[str, Any], path: Path) -> None:
    """Above, the curves on top of each other; below, how far each is from exact, and the band."""
    plt.rcParams["svg.hashsalt"] = "training"
    shown = [name for name in PLOTTED if name in runs]
    figure, axes = plt.subplots(
        2,
        len(shown),
        figsize=(3.1 * len(shown), 5),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [2, 1]},
    )
    for column, name in enumerate(shown):
        losses = {k: np.array(v) for k, v in runs[name]["losses"].items()}
        steps = np.arange(1, len(losses["float64"]) + 1)
        above, below = axes[:, column]
        for side, width in (("torch", 2.5), ("optax", 0.9)):
            curve = losses["float64"] + losses[f"{side} - float64"]
            above.plot(steps, curve, color=COLOURS[side], lw=width, label=side)
        above.set_title(name.replace(", warm-up", ",\nwarm-up"), fontsize=9)
        band = losses["spread"]
        below.fill_between(
            steps, -band, band, color=COLOURS["band"], lw=0, label="spread of perturbed runs (RMS)"
        )
        for side in ("torch", "optax"):
            label = f"{side} - float64"
            below.plot(steps, losses[label], color=COLOURS[side], lw=0.7, label=label)
        below.set_xlabel("step")
        below.ticklabel_format(axis="y", scilimits=(0, 0))
        for axis in (above, below):
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("cross entropy")
    axes[1, 0].set_ylabel("difference")
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    parts = axes[1, 0].get_legend_handles_labels()
    figure.legend(*parts, fontsize=8, frameon=False, ncols=3, loc="lower center")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    plt.close(figure)


def run(name: str, steps: int) -> dict[str, Any]:
    """One run, in a process of its own."""
    start = time.process_time()
    result, losses = trained(name, steps)
    kept = summary(result, losses, time.process_time() - start)
    fractions = kept["largest fraction of budget"]
    parts = ", ".join(f"{what} {value:.2f}" for what, value in fractions.items())
    first, last = kept["loss"]
    heading = f"{result.verdict}  {name}: loss {first:.3f} → {last:.3f}; {parts}"
    print("\n    ".join([heading, *result.reasons[:5]]), flush=True)
    return kept


def main(steps: int = STEPS) -> bool:
    """Train, write and print; whether every verdict is PASS."""
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        # The longest first.
        pending = {name: pool.submit(run, name, steps) for name in reversed(RUNS)}
        runs = {name: pending[name].result() for name in RUNS}
    keep("training", {"steps": steps, "perturbed": PERTURBED, "runs": runs})
    plot(runs, PROFILE / "training.svg")
    return all(run["verdict"] == "PASS" for run in runs.values())


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
