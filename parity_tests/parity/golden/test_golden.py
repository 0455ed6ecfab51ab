"""Golden references: judged as by the reference itself, and every wrong use named."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from helpers.parity.asked_here import AskedHere
from helpers.parity.small_pairs import PAIRS, Pair
from helpers.parity.up import IN, OUT, ROWS, Up
from jax_attn import parity
from jax_attn.parity import Verdict, check, load_golden, prepare
from jax_attn.parity.checking.reference_side import NotAskedError
from jax_attn.parity.frozen.check_frozen import judged_by_answers
from jax_attn.transfer import LINEAR, TransferError, load

PREPARING = ("reference_call", "dtype", "gradients", "seed", "parameters")


def seen(result):
    """What a golden reference must give, too: all but the note that says that it is one."""
    kept = [found for found in result.findings if found.kind != "golden-reference"]
    return result.verdict, result.tensors, kept


class Cast(torch.nn.Module):
    """Errs by its own cast, so that no port can pass."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(IN, OUT)

    def forward(self, x):
        return self.up(x.half().float())


def _errs() -> Pair:
    reference, layout = Cast(), LINEAR.under("up", "up")
    ports = {"right": Up(), "other weights": Up()}
    load(ports["right"], reference.state_dict(), layout)
    x = np.random.default_rng(0).standard_normal((ROWS, IN))
    return Pair(reference, ports, (x,), {"layout": layout})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PAIRS, "errs"])
def test_judges_as_the_reference_does_in_memory_and_from_a_folder(name, tmp_path):
    torch.manual_seed(0)
    pair = {**PAIRS, "errs": _errs}[name]()
    fixed = {name: option for name, option in pair.options.items() if name in PREPARING}
    free = {name: option for name, option in pair.options.items() if name not in PREPARING}
    golden = prepare(pair.reference, pair.inputs, **fixed)
    golden.save(tmp_path / "golden")
    loaded = load_golden(tmp_path / "golden", expect_digest=golden.digest)
    assert replace(loaded).digest == golden.digest  # encoded again
    for port in pair.ports.values():
        options = {"transforms": ("eager",)}
        wanted = check(pair.reference, port, pair.inputs, **pair.options, **options)
        with AskedHere(parity.Pair(None, port, None, **free)) as process:
            asked = judged_by_answers(process, loaded, options).result
        for got in (*(check(each, port, **free, **options) for each in (golden, loaded)), asked):
            if name == "errs" and wanted.verdict is Verdict.FAIL:  # by its weights: see below
                assert got.verdict is Verdict.FAIL
                assert got.tensors == wanted.tensors
            else:
                assert seen(got) == seen(wanted)


def test_other_weights_are_told_by_digest_and_not_in_which_elements(linear, golden):
    reference, _, inputs, layout = linear
    load(other := Up(), reference.state_dict(), layout)
    other.up.bias[...] = other.up.bias[...].at[2].add(1.0)
    by_digest = check(golden, other, layout=layout, transforms=("jit",))
    (differ,) = [f for f in by_digest.failures if f.kind == "weights-differ"]
    assert "'bias' differs by its digest" in differ
    (exact,) = [
        f
        for f in check(reference, other, inputs, layout=layout, transforms=("jit",)).failures
        if f.kind == "weights-differ"
    ]
    assert "'bias' differs in 1 of 7 elements" in exact
    (told,) = [f for f in by_digest.notes if f.kind == "golden-reference"]
    assert golden.digest[:12] in told
    assert f"torch {torch.__version__}" in told


def test_without_a_table_or_with_one_that_does_not_fit(linear, golden):
    _, port, _, _ = linear
    kinds = {f.kind for f in check(golden, port, transforms=("jit",)).findings}
    assert "weights-not-compared" in kinds
    wrong = check(golden, port, layout=LINEAR.under("", "down"), transforms=("jit",))
    assert {f.kind for f in wrong.failures} == {"weights-differ"}


OTHERWISE = {
    "inputs": {"inputs": (np.ones((ROWS, IN), np.float32),)},
    "dtype": {"dtype": "bfloat16"},
    "gradients": {"gradients": False},
    "seed": {"seed": 1},
    "reference_call": {"reference_call": lambda module, x: module(x)},
    "parameters": {"parameters": "bias"},
}


def test_what_is_fixed_is_refused_by_name_and_all_at_once(linear, golden):
    _, port, _, _ = linear
    for name, asked in OTHERWISE.items():
        with pytest.raises(ValueError, match=f"^{name}: expected the golden") as refused:
            check(golden, port, **asked)
        assert len(str(refused.value).splitlines()) == 1
    asked = {name: value for each in OTHERWISE.values() for name, value in each.items()}
    with pytest.raises(ValueError, match="reference_call") as refused:
        check(golden, port, **asked)
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == [*OTHERWISE]


def test_a_golden_reference_has_one_set_of_inputs_so_a_list_is_to_be_left_out(linear, golden):
    _, port, inputs, _ = linear
    with pytest.raises(ValueError, match=r"^inputs: expected the golden.* got a list of 2; leave"):
        check(golden, port, [inputs, inputs])


def test_what_is_fixed_may_be_repeated_and_the_rest_is_free(linear, golden):
    _, port, inputs, layout = linear
    same = {"dtype": "float32", "gradients": True, "seed": 0, "parameters": "*"}
    mesh = jax.make_mesh((1,), ("data",))
    free = {"transforms": ("grad",), "strict": True, "mesh": mesh, "layout": layout}
    result = check(golden, port, inputs, **same, **free)
    assert {t.transform for t in result.tensors} == {"grad", "grad, beside one device"}
    assert "nothing-cut" in {f.kind for f in result.doubts}


def test_selected_parameters_are_compared_alone(linear):
    reference, port, inputs, layout = linear
    options = {"layout": layout, "transforms": ("jit",)}
    golden = prepare(reference, inputs, parameters="bias")
    wanted = check(reference, port, inputs, parameters="bias", **options)
    assert seen(check(golden, port, **options)) == seen(wanted)
    assert "grad bias" in {t.label for t in wanted.tensors}
    assert "grad weight" not in {t.label for t in wanted.tensors}


def test_a_port_with_other_outputs_or_parameters_is_named(linear, golden):
    _, port, _, layout = linear
    with pytest.raises(ValueError, match=r"output: the reference has \['output'\], .*'other'"):
        check(golden, port, port_call=lambda module, x: {"other": module(x)})
    without = check(golden, Up(bias=False), layout=layout, transforms=("jit",))
    assert "`bias`" in str([f for f in without.failures if f.kind == "weights-differ"])


def test_a_question_that_an_older_version_did_not_ask_is_noted(linear, golden):
    _, port, _, layout = linear
    answers = {name: a for name, a in golden.answers.items() if name != "read numbers"}
    result = check(replace(golden, answers=answers), port, layout=layout, transforms=("jit",))
    (note,) = [found for found in result.notes if found.kind == "not-asked"]
    assert "read numbers" in note
    assert result.strict().verdict is Verdict.INCONCLUSIVE


def test_an_explanation_is_asked_for_where_the_reference_is(golden):
    result = check(golden, Up(), transforms=("jit",))
    assert result.verdict is Verdict.FAIL
    assert result.explained().explanation is None
    with pytest.raises(ValueError, match=r"where the reference is, call parity\.explain"):
        result.explain()


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = torch.nn.Linear(OUT, IN), torch.nn.Linear(IN, OUT)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


TWO = """
import jax, numpy as np
from jax_attn import parity

LINES = {"forward": jax.nn.relu, "backward": lambda y: (z := jax.numpy.tanh(y)) + (
    y - jax.lax.stop_gradient(y)) * 0.5 - 0.5 * (z - jax.lax.stop_gradient(z))}

def port(way):
    held = dict(np.load("weights.npz"))
    def call(held, x):
        y = x @ held["up.weight"].T + held["up.bias"]
        return LINES[way](y) @ held["down.weight"].T + held["down.bias"]
    return parity.function(call, held)
"""
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from two import parity, port
for way in ("forward", "backward"):
    result = parity.check(parity.load_golden("golden"), port(way), transforms=("jit",))
    print(result.explain().sentence)
"""


@pytest.mark.slow
def test_taps_tell_without_torch_where_a_port_first_goes_wrong(tmp_path, monkeypatch):
    torch.manual_seed(0)
    reference, x = TwoLayers(), np.random.default_rng(0).standard_normal((ROWS, IN))
    monkeypatch.chdir(tmp_path)
    np.savez("weights.npz", **{k: v.numpy() for k, v in reference.state_dict().items()})
    Path("two.py").write_text(TWO)
    golden = prepare(reference, (x.astype(np.float32),), taps=True)
    golden.save("golden")
    assert "its taps tell" in golden.notes[0]
    command = [sys.executable, "-c", WITHOUT_TORCH]
    path = os.pathsep.join([".", *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    forward, backward = done.stdout.splitlines()
    assert "first differs forward at" in forward
    assert "where the reference has aten.tanh[3, 7]" in forward
    assert "first differs backward at" in backward
    assert "where the reference has aten.tanh_backward[3, 7]" in backward


class Extra(torch.nn.Linear):
    """Has a state that is no tensor, and complex weights."""

    def __init__(self):
        super().__init__(IN, OUT)
        self.turn = torch.nn.Parameter(torch.ones(OUT, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(x) * self.turn.real

    def get_extra_state(self):
        return {"version": 1}


def test_complex_weights_and_a_state_that_is_no_tensor(linear, tmp_path):
    _, port, inputs, layout = linear
    reference = Extra()
    load(port := Up(), {k: reference.state_dict()[k] for k in ("weight", "bias")}, layout)
    prepare(reference, inputs).save(tmp_path / "golden")
    loaded = load_golden(tmp_path / "golden")
    options = {"transforms": ("eager",)}
    wanted = check(reference, port, inputs, **options)
    assert seen(check(loaded, port, **options)) == seen(wanted)
    for args in ((reference, port, inputs), (loaded, port)):
        with pytest.raises(TransferError, match=r"_extra_state.*got dict"):
            check(*args, layout=layout, **options)


def test_float64_is_prepared_without_the_mode_that_ports_need(linear):
    reference, port, inputs, _ = linear
    golden = prepare(copy.deepcopy(reference).double(), inputs, dtype="float64")
    assert golden.exact.outputs["output"].dtype == np.float64
    with pytest.raises(ValueError, match="x64"):
        check(golden, port)


def test_what_an_older_version_did_not_ask_is_told_by_the_folders_digest(linear):
    reference, _, inputs, _ = linear
    golden = prepare(copy.deepcopy(reference).bfloat16(), inputs, dtype="bfloat16")
    with pytest.raises(NotAskedError, match=golden.digest[:12]):
        golden.again.answer("another question")


@pytest.mark.parametrize("argument", ["reference", "inputs", "dtype", "gradients", "seed"])
def test_prepare_names_wrong_arguments(linear, argument):
    reference, _, inputs, _ = linear
    given = {"reference": reference, "inputs": inputs, argument: object()}
    with pytest.raises((TypeError, ValueError), match=f"^{argument}: expected"):
        prepare(**given)


class Rectified(torch.nn.Module):
    """Its gradients at 0 are a convention, on which those of `last` do not depend."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(IN, OUT), torch.nn.Linear(OUT, IN)
        torch.nn.init.zeros_(self.first.weight)
        torch.nn.init.zeros_(self.first.bias)

    def forward(self, x):
        return self.last(self.first(x).relu())


def test_a_convention_takes_only_the_gradients_that_depend_on_it(linear):
    _, _, inputs, _ = linear
    golden = prepare(Rectified(), inputs)
    (convention,) = golden.answers["conventions"]
    assert {*convention.run.parameter_grads} == {"first.weight", "first.bias"}
    assert not convention.run.outputs
    whole = convention.whole(golden.exact)
    assert whole.parameter_grads.keys() == golden.exact.parameter_grads.keys()
