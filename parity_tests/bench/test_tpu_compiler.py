"""Our programs through the TPU's compiler, for the bench. Where libtpu is absent, the one thing
checked of each is that it is refused with the line that installs it."""

import jax
import pytest

from jax_attn.bench.engine import tpu_compiler
from jax_attn.bench.workload import CACHED, DECODE, MODES, Workload
from jax_attn.parity.run.compiled import why_no_tpu_compiler

CORE = Workload("core", False, 1, 5, 7, 6, 3, 8)
LAYER = Workload("layer", True, 2, 5, 5, 6, 3, 8, 48, is_causal=True)
STEP = Workload("step", False, 2, 1, 37, 6, 3, 8, is_causal=True, room=53)


@pytest.mark.parametrize(
    ("workload", "modes"),
    [(CORE, MODES), (LAYER, MODES[:1]), (STEP, (DECODE,))],
    ids=["core", "layer", "step"],
)
def test_each_mode_is_compiled(workload, modes):
    found = list(tpu_compiler.compiled_for_tpu((workload,), (*modes, *CACHED)))
    if why_no_tpu_compiler() is not None:
        assert found == [{"level": tpu_compiler.LEVEL, "missing": why_no_tpu_compiler()}]
        return
    assert [(item["workload"], item["mode"]) for item in found] == [
        (workload.name, m) for m in modes
    ]
    for item in found:
        assert item["target"].startswith("TPU v5")
        assert item["compiler"].startswith("libtpu ")
        assert item["level"] == tpu_compiler.LEVEL
        assert item["kernel"]
        assert {"bytes", "temporaries", "arguments", "outputs"} <= item.keys()
        # No more can be asked of XLA's count: it has the body of a loop once.
        assert item["flops"] > 0
        assert item["useful_flops"] == workload.flops(item["mode"])
    flops = [item["flops"] for item in found]
    assert all(more > 2 * flops[0] for more in flops[1:]), "the backward pass is in it"


RAISED = {
    "the compiler refuses": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory\nand more"),
    "it cannot be traced": NotImplementedError("no such rule"),
}


@pytest.mark.parametrize("row", RAISED)
def test_a_program_that_raises_says_why_and_the_others_follow(monkeypatch, row):
    error = RAISED[row]
    answers = iter([error, {"flops": 7.0}])

    def answer(*args):
        said = next(answers)
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(tpu_compiler, "why_no_tpu_compiler", lambda: None)
    monkeypatch.setattr(tpu_compiler, "compile_for_tpu", answer)
    refused, other = tpu_compiler.compiled_for_tpu((CORE,), MODES)
    assert refused["error"] == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert "flops" not in refused
    assert (other["mode"], other["flops"], bool(other["kernel"])) == (MODES[1], 7.0, True)


def test_without_libtpu_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(tpu_compiler, "why_no_tpu_compiler", lambda: "no libtpu: pip install it")
    assert list(tpu_compiler.compiled_for_tpu((CORE, LAYER), MODES)) == [
        {"level": tpu_compiler.LEVEL, "missing": "no libtpu: pip install it"}
    ]
