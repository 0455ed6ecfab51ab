"""How long a verdict takes: of the built-in rows, of one layer, of a whole model; and the tests.

    python parity_tests/evidence/scripts/verdict_times.py [--only NAME]... [--tests] [--rounds 3]

measures each figure of `FIGURES` three times, in processes of their own, and prints the medians:
`jax-attn verify`; a check of a layer that is 48 wide, the first in a process and another; a check
of a BERT of 109 million parameters with every gradient, and the processor time of its stages. With
--tests, the two halves of the tests, too, which take long. Writes this machine's part of
profile/verdict_times.json; --only measures some figures anew and keeps the others, if they are of
the same versions.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from measuring import PROFILE, seconds

from jax_attn.environment import describe

FILE = PROFILE / "verdict_times.json"
VERDICTS = (" PASS ", " FAIL ", " INCONCLUSIVE ")
MACHINE, SAME = ("processor", "cores"), ("packages", "python")
"""What of the environment names a machine, and what its figures must share."""
Figure = dict[str, float]


def verify() -> Figure:
    """`jax-attn verify`, to its first line with a verdict and to its end."""
    command = [sys.executable, "-m", "jax_attn", "verify"]
    begun, first = time.perf_counter(), None
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=-1, text=True, env=environment) as process:
        for line in process.stdout or ():
            if first is None and any(verdict in line for verdict in VERDICTS):
                first = time.perf_counter() - begun
    assert first is not None, "verify printed no verdict"
    assert process.returncode == 0, "verify did not pass"
    return {"first verdict, seconds": first, "seconds": time.perf_counter() - begun}


def layer() -> Figure:
    """A check with default arguments, as README has it, twice in this process; imports apart."""
    import numpy as np
    import torch

    # torch imports these when it first dispatches a tensor subclass and differentiates.
    import torch.distributed.tensor
    import torch.fx.experimental.symbolic_shapes
    from flax import nnx

    from jax_attn import MultiHeadAttention, parity, transfer

    torch.manual_seed(0)
    reference = torch.nn.MultiheadAttention(48, 6, batch_first=True).eval()
    port = MultiHeadAttention(48, 6, rngs=nnx.Rngs(0))
    layout = transfer.LAYOUTS["torch_mha"]
    transfer.load(port, reference.state_dict(), layout)
    x = np.random.default_rng(0).standard_normal((2, 13, 48))

    def call(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x, x, x)[0]

    def check() -> None:
        options: Any = {"layout": layout, "reference_call": call}
        parity.check(reference, port, (x,), **options).raise_for_status()

    return {"first in a process, seconds": seconds(check), "another, seconds": seconds(check)}


def bert() -> tuple[Any, Any, Any, Any]:
    """Both sides of check_cost.py's largest, their table and their inputs."""
    import check_cost
    import numpy as np

    reference, port, layout = check_cost.models("109M")
    words = check_cost.SIZES["109M"][-1]
    tokens = np.random.default_rng(0).integers(0, words, (check_cost.B, check_cost.T))
    lengths = np.array([check_cost.T, check_cost.T - 5], np.int32)
    return reference, port, layout, {"tokens": tokens.astype(np.int32), "lengths": lengths}


def whole_model() -> Figure:
    """A jitted check of the BERT with every gradient, and the most memory the process held."""
    import check_cost

    from jax_attn import parity

    reference, port, layout, inputs = bert()
    options: Any = {"layout": layout, "transforms": ("jit",)}
    options |= {"reference_call": check_cost.theirs, "port_call": check_cost.ours}
    taken = seconds(lambda: parity.check(reference, port, inputs, **options).raise_for_status())
    return {"seconds": taken, "peak of memory, GiB": check_cost.peak()}


def stages() -> Figure:
    """The processor seconds of each stage of that check, one after the other."""
    import check_cost
    import numpy as np

    from jax_attn.parity.checking.canaries import try_canaries
    from jax_attn.parity.checking.judging import judge_port
    from jax_attn.parity.checking.prepared import Prepared
    from jax_attn.parity.checking.preparing import FEWER_RUNS
    from jax_attn.parity.checking.weights import Weights, compare_weights
    from jax_attn.parity.run.inputs_and_runs import Inputs
    from jax_attn.parity.run.port import Port
    from jax_attn.parity.run.reference import Reference

    reference, port, layout, inputs = bert()
    given = Inputs.of(inputs, np.dtype(np.float32))
    called = Reference(reference, check_cost.theirs, given)
    prepared = Prepared(called, "float32", runs=FEWER_RUNS)
    called_port = Port(port, check_cost.ours, given)
    to_torch = compare_weights(Weights.of(reference), port, layout).to_torch
    parts: dict[str, Callable[[], Any]] = {
        "the reference's own run": lambda: (prepared.inference, prepared.own),
        "oracle": lambda: prepared.exact,
        "perturbed runs": lambda: prepared.budgets,
        "canaries": lambda: try_canaries(prepared),
        "port": lambda: judge_port(prepared, called_port, ("jit",), to_torch=to_torch),
    }
    taken = {}
    for name, part in parts.items():
        begun = time.process_time()
        part()
        taken[name] = time.process_time() - begun
    return taken


def tests(*options: str) -> Figure:
    """A run of the tests, in as many processes as there are cores."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", *options]
    return {"seconds": seconds(lambda: subprocess.run(command, check=True, stdout=sys.stderr))}


FIGURES: dict[str, Callable[[], Figure]] = {
    "jax-attn verify": verify,
    "check of a layer": layer,
    "check of a whole model": whole_model,
    "stages": stages,
}
OF_TESTS: dict[str, Callable[[], Figure]] = {
    "pytest -n auto": tests,
    "pytest -n auto -m slow": functools.partial(tests, "-m", "slow"),
}
EVERY = FIGURES | OF_TESTS


def medians(name: str, rounds: int) -> Figure:
    """The median of each number of a figure, over runs in processes of their own."""
    command = [sys.executable, __file__, "--alone", name]
    runs = []
    for _ in range(rounds):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(name, runs[-1], file=sys.stderr, flush=True)
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def save(rounds: int, figures: dict[str, Figure]) -> str:
    """Put the figures in this machine's place in the file, beside others of it; all of its text."""
    here, machines = describe(), json.loads(FILE.read_text())["machines"]

    def is_alike(machine: dict[str, Any], keys: tuple[str, ...]) -> bool:
        return all(machine["environment"][key] == here[key] for key in keys)

    others = [machine for machine in machines if not is_alike(machine, MACHINE)]
    for machine in machines:
        if is_alike(machine, MACHINE + SAME):
            figures = machine["figures"] | figures
    figures = {name: figures[name] for name in EVERY if name in figures}
    others.append({"environment": here, "rounds": rounds, "figures": figures})
    FILE.write_text(json.dumps({"machines": others}, indent=1) + "\n")
    return FILE.read_text()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=EVERY, metavar="NAME")
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", choices=EVERY, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(EVERY[options.alone]()))
        sys.exit()
    wanted = options.only or [*FIGURES, *(OF_TESTS if options.tests else ())]
    print(save(options.rounds, {name: medians(name, options.rounds) for name in wanted}))
