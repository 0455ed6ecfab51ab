"""A pair is timed if it agrees; what is timed, counted and left as it was."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.bench.bench_stand_in import Fake
from helpers.parity import five_kinds
from helpers.parity.five_kinds import KINDS
from jax_attn import bench
from jax_attn.bench.engine.compare_speed import settings_kept
from jax_attn.bench.engine.pair_judge import flops
from jax_attn.bench.engine.plan import BenchPlan
from jax_attn.bench.engine.processes import Processes
from jax_attn.bench.engine.runner import Runner
from jax_attn.bench.engine.session import UNTRUSTED, Session
from jax_attn.bench.engine.worker import LostError
from jax_attn.bench.pair.pair import TimedPair
from jax_attn.bench.programs.torch_pair import TorchPair
from jax_attn.bench.record import Record, Status
from jax_attn.bench.workload import PAIR_MODES, STEP, PairWorkload
from jax_attn.parity.pair.errors import PairError
from jax_attn.transfer import Layout, linear, load
from jax_attn.transfer import row as pairing

B, D, F = 3, 5, 7
TABLE = Layout(pairing("0.weight", "up", linear), pairing("2.weight", "down", linear))
# What needs no compiler of C++.
WAYS = ("torch eager", "jax.jit", "jax.jit donated")


class Port(nnx.Module):
    def __init__(self):
        self.up, self.down = (nnx.Param(np.zeros(s, np.float32)) for s in ((D, F), (F, D)))

    def __call__(self, x):
        return jax.nn.relu(x @ self.up[...]) @ self.down[...]


def pair() -> TimedPair:
    torch.manual_seed(0)
    reference = torch.nn.Sequential(
        torch.nn.Linear(D, F, bias=False), torch.nn.ReLU(), torch.nn.Linear(F, D, bias=False)
    )
    port = Port()
    load(port, reference.state_dict(), TABLE)
    x = np.random.default_rng(0).standard_normal((B, D)).astype(np.float32)
    return TimedPair(reference, port, (x,), layout=TABLE)


def compared(of: TimedPair, **options) -> Record:
    given = {"layout": of.layout, "ways": WAYS, "rounds": 5} | options
    return bench.compare_speed(of.reference, of.port, of.inputs, **given)


@pytest.fixture(scope="module")
def record() -> Record:
    """Of a run that leaves the caller's modules and settings as they were."""
    of = pair()
    before = [p.detach().clone() for p in of.reference.parameters()]
    params = [np.asarray(a).copy() for a in jax.tree.leaves(nnx.state(of.port, nnx.Param))]
    threads = torch.get_num_threads()
    found = compared(of, threads=1)
    assert all(map(torch.equal, before, of.reference.parameters()))
    after = jax.tree.leaves(nnx.state(of.port, nnx.Param))
    assert all(map(np.array_equal, params, after))
    assert torch.get_num_threads() == threads
    assert jax.config.jax_default_matmul_precision is None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equinox", "function"])  # one object; a function with its tree
def test_a_port_of_another_kind_is_timed_as_it_was_handed_in(kind):
    reference = five_kinds.reference()
    port = five_kinds.port(kind, reference)
    seen = []

    def call(handed_in, x):
        seen.append(type(handed_in))
        return handed_in(x)

    made = bench.compare_speed(
        *(reference, port, five_kinds.inputs()),
        layout=KINDS[kind].layout,
        port_call=call,
        modes=(STEP,),
        ways=("torch eager", "jax.jit donated"),
        rounds=2,
    )
    assert {row.implementation for row in made.rows} == {"torch eager", "jax.jit donated"}
    assert {row.status for row in made.rows} == {Status.MEASURED}
    assert len({*seen}) == 1


@pytest.mark.slow
def test_each_way_is_timed_in_each_mode_that_it_has(record):
    rows = {(row.mode, row.implementation): row for row in record.rows}
    assert {*rows} == {(mode, way) for mode in PAIR_MODES for way in WAYS[:2]} | {(STEP, WAYS[2])}
    for row in rows.values():
        assert (row.status, len(row.seconds)) == (Status.MEASURED, 5)
        assert row.ratio is not None
        assert row.verdict == (None if row.framework == "torch" else "PASS")
    assert rows["forward", "torch eager"].compile_s is None
    assert rows["forward", "jax.jit"].compile_s > 0


@pytest.mark.slow
def test_operations_are_those_of_the_products(record):
    product = 2 * B * D * F
    counted = dict(record.rows[0].workload.counted)
    # Backward: each product's gradient of its weights, and the second one's of its input.
    assert counted == {"forward": 2 * product, **dict.fromkeys(PAIR_MODES[1:], 5 * product)}


def test_operations_of_fused_layers_are_counted():
    """In inference torch runs the whole layer as one operation of its own."""
    B, T, D = 2, 7, 6
    module = torch.nn.MultiheadAttention(D, 3, batch_first=True).eval()
    x = np.ones((B, T, D), np.float32)
    of = TimedPair(module, Port(), (x,), reference_call=lambda module, x: module(x, x, x)[0])
    counted = flops(TorchPair(of, "cpu"), 0, ("forward",))
    assert counted == {"forward": 4 * 2 * B * T * D * D + 2 * 2 * B * T * T * D}


@pytest.mark.slow
def test_the_record_returns_from_json_and_reads_as_a_table(record):
    assert Record.from_json(record.to_json()) == record
    text = bench.markdown(record)
    assert "## the pair, training-step" in text
    assert "inputs 0 float32[3, 5]" in text
    assert "| jax.jit donated |" in text


def wrong() -> TimedPair:
    of = pair()
    of.port.up[...] = of.port.up[...].at[0, 0].add(1e-3)
    return of


def test_a_pair_that_disagrees_is_listed_and_not_timed():
    rows = compared(wrong(), modes=("forward",)).rows
    assert {row.status for row in rows} == {Status.EXCLUDED}
    (port,) = (row for row in rows if row.framework == "jax")
    assert port.verdict == "FAIL"
    assert "0.weight" in port.reason


@pytest.mark.slow
def test_untrusted_it_is_timed_under_that_heading():
    rows = compared(wrong(), modes=("forward",), untrusted=True).rows
    assert all(row.seconds and row.reason.startswith(UNTRUSTED) for row in rows)


@pytest.mark.slow
def test_compiling_is_cold_though_a_cache_on_disk_has_the_program():
    """As this suite's own cache does after the first run."""
    hits = []

    def listen(event: str, **_: object) -> None:
        hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None

    with settings_kept():
        for _ in range(2):
            runner = Runner("jax.jit", "cpu", 1, (pair(), ()))
            runner.load()
            runner.build(PairWorkload("a", "x", "float32"), 0)
            jax.clear_caches()
            jax.monitoring.register_event_listener(listen)
            try:
                runner.compile("forward")
            finally:
                jax.monitoring.unregister_event_listener(listen)
    assert hits == []


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PairError, match="expected a GPU that torch can use, because JAX uses one"):
        compared(pair())


def lost(*_):
    return LostError("judge: its process was killed, perhaps because memory ran out")


def test_a_judge_that_is_lost_is_told_and_waited_for(monkeypatch):
    monkeypatch.setattr(Fake, "answers", {("judge", "load"): {}, ("judge", "judged"): lost})
    monkeypatch.setattr(Fake, "started", [])
    session = Session(BenchPlan(WAYS, 1, pair="mine.py:make"), start=Fake)
    with session, pytest.raises(PairError, match="killed, perhaps because memory ran out"):
        list(session.run())
    (judge,) = Fake.started
    assert judge.patience is None, "however long a large model takes"


def test_products_of_float64_are_in_float64(monkeypatch):
    monkeypatch.setattr(Fake, "answers", {})
    monkeypatch.setattr(Fake, "started", [])
    Processes(BenchPlan(WAYS, 1, pair="mine.py:make"), Fake).for_rooflines("float64")
    assert {worker.environment["JAX_ENABLE_X64"] for worker in Fake.started} == {"1"}


def test_all_that_is_wrong_is_told_at_once():
    wrong = {"modes": ("sideways",), "ways": ("numpy",), "baseline": "numpy", "rounds": 0}
    with pytest.raises(PairError) as told:
        bench.compare_speed(None, pair().port, [1], reference_call=3, threads=10**6, **wrong)
    for text in (
        "reference: expected a torch.nn.Module, got NoneType",
        *(
            "inputs: ",
            "reference_call: ",
            "modes: expected some of",
            "ways: expected",
            "baseline: expected",
        ),
        *("rounds: expected at least 1, got 0", "threads: expected 1 to"),
    ):
        assert text in str(told.value)


def test_a_frozen_reference_is_timed_forward_alone():
    of = pair()
    of.reference[0].weight.requires_grad_(False)
    assert of.modes == of.usual_modes == ("forward",)
    with pytest.raises(PairError, match="gradients need parameters, and none may be frozen"):
        compared(of, modes=(STEP,))


def test_what_it_raises_is_told():
    with pytest.raises(PairError, match=r"expected it to run on inputs 0 float32\[3, 4\]"):
        compared(replace(pair(), inputs=(np.ones((B, D - 1), np.float32),)))
