"""`parity.explain` of a block: where a port is first wrong, and what would explain it."""

import functools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.block_pair import LAYOUT, B, FlaxBlock, T, pair
from helpers.parity.block_pair import D as WIDTH
from jax_attn import parity
from jax_attn.attention import Mask
from jax_attn.parity.explaining.explanation import where

X = np.random.default_rng(0).standard_normal((B, T, WIDTH)).astype(np.float32)
IGNORED = np.arange(T) >= np.array([[T], [T - 2]])


class WrongActivation(FlaxBlock):
    def __call__(self, x, ignored=None):
        y = self.attention(self.norm(x), mask=Mask.from_torch_mha(key_padding_mask=ignored))
        return self.head(jax.nn.relu(x + y))


class WrongPolarity(FlaxBlock):
    def __call__(self, x, ignored=None):
        return super().__call__(x, ~ignored)


class WrongEpsilon(FlaxBlock):
    def __init__(self, dtype=jnp.float32):
        super().__init__(dtype)
        self.norm.epsilon = 1e-3


class TwoWrong(WrongEpsilon):
    def __call__(self, x, ignored=None):
        return WrongActivation.__call__(self, x, ignored)


class NotCentred(FlaxBlock):
    def __call__(self, x, ignored=None):
        norm = self.norm
        y = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + norm.epsilon)
        y = y * norm.scale[...] + norm.bias[...]
        y = self.attention(y, mask=Mask.from_torch_mha(key_padding_mask=ignored))
        return self.head(jnp.tanh(x + y))


class OutsideTheCatalogue(FlaxBlock):
    def __call__(self, x, ignored=None):
        y = self.attention(self.norm(x), mask=Mask.from_torch_mha(key_padding_mask=ignored))
        return self.head(jnp.tanh(x + jnp.sin(3 * y)))


class StoppedGradient(FlaxBlock):
    def __call__(self, x, ignored=None):
        y = self.norm(x)
        y = self.attention(y, jax.lax.stop_gradient(y), y, Mask.from_torch_mha(None, ignored))
        return self.head(jnp.tanh(x + y))


class OneQuery(FlaxBlock):
    def __call__(self, x, ignored=None):
        return super().__call__(x.at[1, 3].multiply(1.01), ignored)


class Scatters(FlaxBlock):
    def __call__(self, x, ignored=None):
        return super().__call__(x, ignored).at[0, 0].add(1.0)


class WrongWhenEager(FlaxBlock):
    def __call__(self, x, ignored=None):
        return super().__call__(x if isinstance(x, jax.core.Tracer) else 1.1 * x, ignored)


@functools.cache
def explain(port: type[nnx.Module]) -> parity.Explanation:
    """The explanation of a port; tests of the same one share it."""
    is_backward = port is StoppedGradient
    return parity.explain(
        *pair(port=port), (X, IGNORED), layout=LAYOUT, transforms=("jit",), gradients=is_backward
    )


EPSILON = ("aten.native_layer_norm: add", "norm", "epsilon")
ACTIVATION = ("aten.tanh", "", "activation (relu)")
WRONG = {
    # port -> (the reference's operation, where it is) of each region, and its cause's name
    WrongActivation: [ACTIVATION],
    WrongEpsilon: [EPSILON],
    TwoWrong: [EPSILON, ACTIVATION],
    NotCentred: [("aten.native_layer_norm: mul", "norm", "norm (RMS norm)")],
    WrongPolarity: [("aten.add", "attention", "mask (polarity)")],
    OutsideTheCatalogue: [("aten.addmm", "attention", None)],
    StoppedGradient: [("aten.mm", "attention", "gradient (one path stopped)")],
}


def found(explanation: parity.Explanation) -> list[tuple]:
    """Operation, module and confirmed cause of each region."""
    return [
        (
            region.first_wrong.theirs.op,
            region.first_wrong.theirs.place.module,
            region.causes[0].name if region.causes and region.causes[0].confirmed else None,
        )
        for region in explanation.regions
    ]


@pytest.mark.slow
@pytest.mark.parametrize("port", WRONG)
def test_the_first_wrong_tensors_and_their_causes(port):
    explanation = explain(port)
    assert explanation.verdict == "FAIL"
    assert found(explanation) == WRONG[port]
    places = [region.first_wrong.theirs.place for region in explanation.regions]
    assert {place.is_backward for place in places} == {port is StoppedGradient}


@pytest.mark.slow
@pytest.mark.parametrize("port", WRONG)
def test_each_script_has_the_two_tensors(port):
    for region in explain(port).regions:
        script = {"__name__": "script"}
        exec(region.repro, script)
        ours, theirs = script["both"]()
        assert ours.shape == theirs.shape == region.first_wrong.ours.shape
        with np.errstate(invalid="ignore"):
            apart = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
        assert (apart > 1e-4 * np.abs(theirs[np.isfinite(theirs)]).max()).any()


@pytest.mark.slow
def test_a_script_of_the_first_wrong_place_runs_alone(tmp_path):
    script = explain(WrongEpsilon).repro
    (tmp_path / "wrong.py").write_text(script)
    run = subprocess.run(
        [sys.executable, "-W", "error", "wrong.py"], cwd=tmp_path, capture_output=True, text=True
    )
    shown = re.compile(r"furthest apart at \[[0-9, ]+\]: \S+, expected \S+\n")
    assert (run.stderr, bool(shown.fullmatch(run.stdout))) == ("", True), run
    assert "jax_attn" not in script


@pytest.mark.slow
def test_the_sentence_names_the_cause_its_numbers_and_its_place():
    explained = explain(WrongEpsilon)
    said = "The port computes what the reference would with an epsilon of 0.001 in place of 1e-05"
    assert explained.sentence == f"{said} in `norm` (block_pair.py:28)."
    (cause,) = explained.regions[0].causes
    assert (cause.value, cause.confirmed) == (1e-3, True)
    assert cause.explained == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_the_report_and_plain_data_have_every_region_and_the_tensors_around_it():
    explained = explain(WrongEpsilon)
    shown = ("FAIL  The port computes", "  right   ", "  WRONG   ", "furthest apart at [", "cause")
    assert [words for words in shown if words not in str(explained)] == []
    data = json.loads(json.dumps(explained.to_json()))
    (region,) = data["regions"]
    assert region["first_wrong"]["theirs"]["module"] == "norm"
    assert [cause["name"] for cause in region["causes"]] == ["epsilon"]
    assert data["verdict"] == "FAIL"


class Renamed(torch.nn.Module):
    """A reference whose modules and parameters have names that say nothing."""

    def __init__(self, block):
        super().__init__()
        self.a = block

    def forward(self, x, ignored=None):
        return self.a(x, ignored)


@pytest.mark.slow
def test_names_decide_nothing():
    reference, port = pair(port=WrongEpsilon)
    inputs = (X, IGNORED)
    renamed = parity.explain(Renamed(reference), port, inputs, transforms=("jit",), gradients=False)
    assert found(renamed) == [("aten.native_layer_norm: add", "a.norm", "epsilon")]


@pytest.mark.slow
def test_of_a_right_port_nothing_differs():
    explanation = explain(FlaxBlock)
    assert (explanation.verdict, explanation.regions) == ("PASS", ())
    assert explanation.sentence.startswith("No difference")


@pytest.mark.slow
def test_where_in_a_tensor_is_said():
    (region, *_) = explain(OneQuery).regions
    assert where(region.first_wrong) == [
        "axis 0: wrong only at 1 of 0 to 1",
        "axis 1: wrong only at 3 of 0 to 6",
    ]


@pytest.mark.slow
def test_an_operation_that_is_no_one_call_leaves_no_script():
    explanation = explain(Scatters)
    assert [region.first_wrong.ours.op for region in explanation.regions] == ["scatter-add"]
    assert explanation.repro == ""


@pytest.mark.slow
def test_tensors_that_do_not_fit_into_half_of_the_free_memory_are_refused(monkeypatch):
    result = parity.check(*pair(port=WrongActivation), (X, IGNORED), transforms=("jit",))
    monkeypatch.setattr("jax_attn.parity.explaining.explain.free_memory", lambda: 2**12)
    with pytest.raises(ValueError, match="whose tensors fit into half of the free memory"):
        result.explain()


@pytest.mark.slow
def test_where_numbers_are_nan_nothing_is_claimed():
    x = X.copy()
    x[0, 0, 0] = np.nan
    explanation = parity.explain(
        *pair(port=WrongActivation), (x, IGNORED), gradients=False, transforms=("jit",)
    )
    assert explanation.regions == ()
    assert "no tensor inside the port could be told to be the first" in explanation.sentence


@pytest.mark.slow
def test_a_port_that_is_wrong_under_eager_alone_is_told_so():
    arguments = (*pair(port=WrongWhenEager), (X, IGNORED))
    explanation = parity.explain(*arguments, layout=LAYOUT, gradients=False)
    assert explanation.regions == ()
    assert explanation.sentence == (
        "The port passes under jit and fails under eager: it computes something else on concrete "
        "arrays than when it is traced."
    )
