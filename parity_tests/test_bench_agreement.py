"""Nobody is timed for wrong numbers: what the bench's judge passes, and what it does not."""

import os
from functools import cache

import jax
import numpy as np
import pytest
import torch

from jax_attn.bench.agreement import Judge
from jax_attn.bench.implementations import IMPLEMENTATIONS, Implementation
from jax_attn.bench.measured import Measured
from jax_attn.bench.program import UnsuitedError
from jax_attn.bench.record import MODES, Workload
from jax_attn.parity.compare import Verdict

os.environ["KERAS_BACKEND"] = "jax"  # as the bench's workers have it; read when keras loads

CORE = Workload("core", False, 2, 257, 263, 4, 2, 5, is_causal=True)  # judged on 128 rows
MULTI_HEAD = Workload("multi-head", True, 2, 7, 7, 3, 3, 5, D=15, is_causal=True)
GROUPED = Workload("grouped", True, 2, 7, 7, 4, 2, 3, D=12)
MULTI_QUERY = Workload("multi-query", True, 2, 7, 7, 3, 1, 5, D=15, is_causal=True)
BACKWARD = MODES[1]


@pytest.fixture(autouse=True)
def settings_put_back():
    """An engine settles its whole process, which is a worker's; here others' tests follow."""
    precision, threads = jax.config.jax_default_matmul_precision, torch.get_num_threads()
    yield
    jax.config.update("jax_default_matmul_precision", precision)
    torch.set_num_threads(threads)
    torch._inductor.config.force_disable_caches = False


@cache
def judge_of(workload: Workload) -> Judge:
    """A judge that knows what torch's fused attention gives."""
    judge = Judge()
    judge.prepare(workload, 0, MODES)
    for mode in MODES:
        judge.take_own(mode, tensors("sdpa", workload, mode))
    return judge


def tensors(name: str, workload: Workload, mode: str):
    measured = Measured(name, "cpu", 1)
    measured.load()
    measured.build(workload, 0)
    return measured.tensors(mode)


# torchax may be there and not import; what torch.compile has the C++ compiler make of `torch
# eager` takes 10 s a row.
SLOW = ("torchax", "torch.compile")
SAME_LAYER = ("jax-attn dense", "jax-attn blocked")  # as "jax-attn"'s, around another kernel
HERE = {n: i for n, i in IMPLEMENTATIONS.items() if n not in SLOW and not i.absent}


def available(*workloads: Workload) -> list:
    """(implementation, workload) of every pair that has a builder here."""
    return [
        pytest.param(name, w, id=f"{name}-{w.name}")
        for name, implementation in HERE.items()
        for w in workloads
        if implementation.builder(w) and not (w.layer and name in SAME_LAYER)
    ]


@pytest.mark.parametrize(("name", "workload"), available(MULTI_HEAD))
def test_every_implementation_of_a_layer_agrees_forward_and_backward(name, workload):
    found = judge_of(workload).judge(BACKWARD, tensors(name, workload, BACKWARD))
    assert found.reasons == ()
    assert found.verdict is Verdict.PASS
    assert 0 < found.error < 1e-6
    assert 0 < found.reference_error < 1e-6


@pytest.mark.parametrize(("name", "workload"), available(CORE, GROUPED))
def test_and_of_grouped_queries(name, workload):
    try:
        given = tensors(name, workload, "forward")
    except UnsuitedError as error:
        assert "as many key/value heads" in str(error)  # noqa: PT017
        return
    assert judge_of(workload).judge("forward", given).verdict is Verdict.PASS


def test_and_the_published_multi_query_code():
    given = tensors("torch eager", MULTI_QUERY, BACKWARD)
    assert judge_of(MULTI_QUERY).judge(BACKWARD, given).verdict is Verdict.PASS


def planted(monkeypatch, builder: str) -> None:
    row = Implementation("planted", "torch", f"bench_stand_in:{builder}")
    monkeypatch.setitem(IMPLEMENTATIONS, "planted", row)


WRONG = {
    "scale off by 1%": ("scale_off", "forward", "output"),
    "causal ignored": ("causal_ignored", "forward", "output"),
    "key's gradient lost": ("key_gradient_lost", BACKWARD, "grad input key"),
}


@pytest.mark.parametrize("row", WRONG)
def test_wrong_numbers_fail_and_the_tensor_is_named(monkeypatch, row):
    builder, mode, label = WRONG[row]
    planted(monkeypatch, builder)
    found = judge_of(CORE).judge(mode, tensors("planted", CORE, mode))
    assert found.verdict is Verdict.FAIL
    assert any(reason.startswith(f"{label}: error over budget") for reason in found.reasons)


def test_a_wrong_gradient_alone_leaves_the_output_right(monkeypatch):
    planted(monkeypatch, "key_gradient_lost")
    given = tensors("planted", CORE, "forward")
    assert judge_of(CORE).judge("forward", given).verdict is Verdict.PASS


def test_one_wrong_row_among_those_judged_is_seen():
    given = tensors("sdpa", CORE, "forward")
    output = given["output"]["output"].copy()
    output[-1, -1] *= 1.001
    found = judge_of(CORE).judge("forward", {"output": {"output": output}})
    assert found.verdict is Verdict.FAIL


def test_what_has_not_its_tensors_is_an_error():
    with pytest.raises(ValueError, match=r"expected \['key', 'query', 'value'\], got \['query'\]"):
        judge_of(CORE).judge(BACKWARD, {"gradient of input": {"query": np.zeros(1)}})


def test_scores_that_would_not_fit_are_not_written(monkeypatch):
    measured = Measured("torch eager", "cpu", 1)
    measured.load()
    measured.build(CORE, 0)
    need = 4 * CORE.B * CORE.N * CORE.T * CORE.S * 2
    monkeypatch.setattr(measured.engine, "available", lambda: 2 * need)
    assert measured.compile("forward") == (None, None)
    monkeypatch.setattr(measured.engine, "available", lambda: 2 * need - 1)
    with pytest.raises(UnsuitedError, match="writes every score"):
        measured.compile("forward")


def test_weights_and_inputs_are_arguments_of_what_jax_compiles():
    measured = Measured("jax-attn", "cpu", 1)
    measured.load()
    measured.build(MULTI_HEAD, 0)
    text = measured.engine.jitted["forward"].lower(*measured.engine.leaves).as_text()
    assert len(measured.engine.leaves) == 1 + 8
    # A weight folded in would stand there as a constant of many numbers.
    assert "dense_resource" not in text
    assert 'dense<"0x' not in text
    assert torch.is_inference_mode_enabled() is False
