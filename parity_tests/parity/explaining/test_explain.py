"""`parity.explain`: where a port is first wrong, and what would explain it."""

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


class StoppedGradient(FlaxBlock):
    def __call__(self, x, ignored=None):
        y = self.norm(x)
        y = self.attention(y, jax.lax.stop_gradient(y), y, Mask.from_torch_mha(None, ignored))
        return self.head(jnp.tanh(x + y))


class OutsideTheCatalogue(FlaxBlock):
    def __call__(self, x, ignored=None):
        y = self.attention(self.norm(x), mask=Mask.from_torch_mha(key_padding_mask=ignored))
        return self.head(jnp.tanh(x + jnp.sin(3 * y)))


@functools.cache
def explain(port: type[nnx.Module], *, gradients: bool) -> parity.Explanation:
    """The explanation of a port; tests of the same one share it."""
    return parity.explain(
        *pair(port=port), (X, IGNORED), layout=LAYOUT, transforms=("jit",), gradients=gradients
    )


WRONG = {
    # port -> (the reference's operation, where it is) of each region, and its cause's name
    WrongActivation: [("aten.tanh", "", "activation (relu)")],
    WrongEpsilon: [("aten.native_layer_norm: add", "norm", "epsilon")],
    TwoWrong: [
        ("aten.native_layer_norm: add", "norm", "epsilon"),
        ("aten.tanh", "", "activation (relu)"),
    ],
    WrongPolarity: [("aten.add", "attention", "mask (polarity)")],
    OutsideTheCatalogue: [("aten.addmm", "attention", None)],
}


@pytest.mark.slow
@pytest.mark.parametrize("port", WRONG)
def test_the_first_wrong_tensors_and_their_causes(port):
    explanation = explain(port, gradients=False)
    assert explanation.verdict == "FAIL"
    found = [
        (
            region.first_wrong.theirs.op,
            region.first_wrong.theirs.place.module,
            region.causes[0].name if region.causes and region.causes[0].confirmed else None,
        )
        for region in explanation.regions
    ]
    assert found == WRONG[port]


def test_of_a_right_port_nothing_differs():
    explanation = explain(FlaxBlock, gradients=False)
    assert (explanation.verdict, explanation.regions) == ("PASS", ())
    assert explanation.sentence.startswith("No difference")


@pytest.mark.slow
def test_a_gradient_that_is_stopped_is_found_where_every_output_is_right():
    explanation = explain(StoppedGradient, gradients=True)
    (region,) = explanation.regions
    assert region.first_wrong.theirs.place.is_backward
    assert region.causes[0].name == "gradient (one path stopped)"


@pytest.fixture(scope="module")
def explained():
    return explain(WrongEpsilon, gradients=False)


@pytest.mark.slow
def test_the_sentence_names_the_cause_its_numbers_and_its_place(explained):
    said = "The port computes what the reference would with an epsilon of 0.001 in place of 1e-05"
    assert explained.sentence == f"{said} in `norm` (block_pair.py:28)."
    (cause,) = explained.regions[0].causes
    assert (cause.value, cause.confirmed) == (1e-3, True)
    assert cause.explained == pytest.approx(1.0, abs=1e-3)


def test_the_report_shows_the_tensors_around_the_error(explained):
    text = str(explained)
    for words in (
        "FAIL  The port computes",
        "  right   ",
        "  WRONG   ",
        "furthest apart at [",
        "cause",
    ):
        assert words in text


def test_plain_data_has_every_region(explained):
    data = explained.to_json()
    json.dumps(data)
    (region,) = data["regions"]
    assert region["first_wrong"]["theirs"]["module"] == "norm"
    assert [cause["name"] for cause in region["causes"]] == ["epsilon"]
    assert data["verdict"] == "FAIL"


def test_where_in_a_tensor_is_said():
    class OneQuery(FlaxBlock):
        def __call__(self, x, ignored=None):
            return super().__call__(x.at[1, 3].multiply(1.01), ignored)

    (region, *_) = explain(OneQuery, gradients=False).regions
    assert where(region.first_wrong) == [
        "axis 0: wrong only at 1 of 0 to 1",
        "axis 1: wrong only at 3 of 0 to 6",
    ]


def test_tensors_that_do_not_fit_into_half_of_the_free_memory_are_refused(monkeypatch):
    result = parity.check(*pair(port=WrongActivation), (X, IGNORED), transforms=("jit",))
    monkeypatch.setattr("jax_attn.parity.explaining.explain.free_memory", lambda: 2**12)
    with pytest.raises(ValueError, match="whose tensors fit into half of the free memory"):
        result.explain()


def test_where_numbers_are_nan_nothing_is_claimed():
    x = X.copy()
    x[0, 0, 0] = np.nan
    explanation = parity.explain(
        *pair(port=WrongActivation), (x, IGNORED), gradients=False, transforms=("jit",)
    )
    assert explanation.regions == ()
    assert "no tensor inside the port could be told to be the first" in explanation.sentence


class Angles(torch.nn.Module):
    def forward(self, x):
        frequencies = 10_000.0 ** -(torch.arange(WIDTH, dtype=x.dtype) / WIDTH)
        return torch.sin(x * frequencies)


class AnglesOfAnotherBase(nnx.Module):
    def __call__(self, x):
        return jnp.sin(x * 9000.0 ** -(jnp.arange(WIDTH, dtype=x.dtype) / WIDTH))


def test_a_rotary_base_is_solved_for():
    explanation = parity.explain(
        Angles(), AnglesOfAnotherBase(), (X,), gradients=False, transforms=("jit",)
    )
    (cause,) = explanation.regions[0].causes
    assert (cause.name, cause.confirmed) == ("rotary (base)", True)
    assert cause.value == pytest.approx(9000, rel=1e-5)


class SeesAll(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT / WIDTH, -1) @ x


class SeesThePast(nnx.Module):
    def __call__(self, x):
        scores = jnp.where(jnp.tri(T, dtype=bool), x @ x.mT / WIDTH, -jnp.inf)
        return jax.nn.softmax(scores) @ x


def test_a_mask_that_the_reference_lacks_is_that_of_the_port():
    explanation = parity.explain(
        SeesAll(), SeesThePast(), (X,), gradients=False, transforms=("jit",)
    )
    (cause,) = explanation.regions[0].causes
    hidden, scores = B * T * (T - 1) // 2, B * T * T
    assert cause.name == "mask (where there is none)"
    assert f"hides {hidden} of {scores} scores" in cause.says


class WrongWhenEager(FlaxBlock):
    def __call__(self, x, ignored=None):
        is_traced = isinstance(x, jax.core.Tracer)
        return super().__call__(x if is_traced else 1.1 * x, ignored)


def test_a_port_that_is_wrong_under_eager_alone_is_told_so():
    arguments = (*pair(port=WrongWhenEager), (X, IGNORED))
    explanation = parity.explain(*arguments, layout=LAYOUT, gradients=False)
    assert explanation.regions == ()
    assert explanation.sentence == (
        "The port passes under jit and fails under eager: it computes something else on concrete "
        "arrays than when it is traced."
    )


SHOWN = re.compile(r"furthest apart at \[[0-9, ]+\]: \S+, expected \S+\n")


@pytest.mark.slow
def test_a_script_of_the_first_wrong_place_runs_alone(explained, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(explained.repro)
    run = subprocess.run(
        [sys.executable, "-W", "error", path.name], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.stderr == ""
    assert SHOWN.fullmatch(run.stdout)
    assert "jax_attn" not in explained.repro


@pytest.mark.slow
@pytest.mark.parametrize("port", [*WRONG, StoppedGradient])
def test_each_script_has_the_two_tensors(port):
    explanation = explain(port, gradients=port is StoppedGradient)
    for region in explanation.regions:
        script = {"__name__": "script"}
        exec(region.repro, script)
        ours, theirs = script["both"]()
        assert ours.shape == theirs.shape == region.first_wrong.ours.shape
        with np.errstate(invalid="ignore"):
            apart = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
        assert (apart > 1e-4 * np.abs(theirs[np.isfinite(theirs)]).max()).any()


class Scatters(FlaxBlock):
    def __call__(self, x, ignored=None):
        return super().__call__(x, ignored).at[0, 0].add(1.0)


def test_an_operation_that_is_no_one_call_leaves_no_script():
    explanation = explain(Scatters, gradients=False)
    assert [region.first_wrong.ours.op for region in explanation.regions] == ["scatter-add"]
    assert explanation.repro == ""


class WritesInPlace(torch.nn.Module):
    def forward(self, x):
        y = x.clone()
        y[..., 0] *= 2
        return torch.tanh(y)


class WritesNothing(nnx.Module):
    def __call__(self, x):
        return jnp.tanh(x)


def test_a_script_that_would_not_give_the_reference_s_numbers_is_none():
    """What is written into a part of a tensor is not among the operations that make the tensor."""
    explanation = parity.explain(
        WritesInPlace(), WritesNothing(), (X,), gradients=False, transforms=("jit",)
    )
    assert len(explanation.regions) == 1
    assert explanation.repro == ""


class Linear(torch.nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class DoubledBias(nnx.Module):
    def __init__(self, reference):
        self.weight, self.bias = (
            nnx.Param(jnp.array(p.detach().numpy())) for p in reference.parameters()
        )

    def __call__(self, x):
        return jnp.tanh(x @ self.weight[...].T + 2 * self.bias[...])


def test_a_product_that_is_right_inside_a_linear_layer_is_not_the_wrong_tensor():
    torch.manual_seed(0)
    reference = Linear(WIDTH, 17)
    explanation = parity.explain(
        reference, DoubledBias(reference), (X,), gradients=False, transforms=("jit",)
    )
    (region,) = explanation.regions
    assert region.first_wrong.theirs.op == "aten.addmm: mul"  # of the bias by beta, which is 1
    assert [tap.op for tap in region.equations] == ["mul"]
    assert [cause.name for cause in region.causes] == ["bias (twice)"]


class TurnedByHalves(torch.nn.Module):
    """As transformers' `rotate_half` has it."""

    def forward(self, x):
        first, second = x.chunk(2, -1)
        angles = torch.arange(T, dtype=x.dtype)[:, None] * 0.7 ** torch.arange(WIDTH // 2)
        cos, sin = (torch.cat((f(angles),) * 2, -1) for f in (torch.cos, torch.sin))
        return x * cos + torch.cat((-second, first), -1) * sin


class TurnedBackwards(nnx.Module):
    """The second half turns the wrong way."""

    def __call__(self, x):
        first, second = jnp.split(x, 2, -1)
        angles = jnp.arange(T, dtype=x.dtype)[:, None] * 0.7 ** jnp.arange(WIDTH // 2)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate((first * cos - second * sin, second * cos - first * sin), -1)


def test_one_half_of_a_rotation_is_told_from_the_other():
    explanation = parity.explain(
        TurnedByHalves(), TurnedBackwards(), (X,), gradients=False, transforms=("jit",)
    )
    (region,) = explanation.regions
    assert (region.first_wrong.ours.op, region.first_wrong.theirs.op) == (
        "sub",
        "aten.add: second half",
    )
    assert len(region.equations) == 1


N, H = 6, 5


class Heads(torch.nn.Module):
    def forward(self, x):
        return (3 * x).unflatten(-1, (N, H)).transpose(1, 2).softmax(-2)


def heads(x):
    return (3 * x).reshape(B, T, N, H).swapaxes(1, 2)


DERANGED = [3, 0, 5, 1, 2, 4]


class HeadsInAnotherOrder(nnx.Module):
    def __call__(self, x):
        return jax.nn.softmax(heads(x)[:, jnp.array(DERANGED)], -2)


class QueriesReversed(nnx.Module):
    def __call__(self, x):
        return jax.nn.softmax(heads(x)[:, :, ::-1], -2)


@pytest.mark.parametrize(
    ("port", "name", "order"),
    [
        (HeadsInAnotherOrder, "head order (permuted)", DERANGED),
        (QueriesReversed, "order (permuted)", [*reversed(range(T))]),
    ],
)
def test_the_same_numbers_in_another_order_are_told_with_the_order(port, name, order):
    explanation = parity.explain(Heads(), port(), (X,), gradients=False, transforms=("jit",))
    (region,) = explanation.regions
    (cause,) = region.causes
    assert (cause.name, cause.confirmed) == (name, True)
    assert cause.value == ", ".join(map(str, order))
    assert where(region.first_wrong)[0] == "the reference's numbers, in another order"


class Tripled(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(3 * x)


class NotTripled(nnx.Module):
    def __call__(self, x):
        return jnp.tanh(x)


def test_a_factor_that_the_port_leaves_out_is_no_other_activation():
    explanation = parity.explain(
        Tripled(), NotTripled(), (X,), gradients=False, transforms=("jit",)
    )
    (cause,) = explanation.regions[0].causes
    assert (cause.name, cause.says) == ("scale (left out)", "no multiplication by 3")


class NotCentred(FlaxBlock):
    def __call__(self, x, ignored=None):
        norm = self.norm
        y = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + norm.epsilon)
        y = y * norm.scale[...] + norm.bias[...]
        y = self.attention(y, mask=Mask.from_torch_mha(key_padding_mask=ignored))
        return self.head(jnp.tanh(x + y))


@pytest.mark.slow
def test_a_square_that_a_layer_norm_lacks_is_no_square_too_many():
    (region,) = explain(NotCentred, gradients=False).regions
    assert [cause.name for cause in region.causes] == ["norm (RMS norm)"]


class Empty(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) + torch.tanh(x[:0]).sum()


class EmptyToo(nnx.Module):
    def __call__(self, x):
        return jnp.tanh(1.37 * x) + x[:0].sum()


def test_an_empty_tensor_beside_the_wrong_one_is_no_hindrance():
    explanation = parity.explain(Empty(), EmptyToo(), (X,), gradients=False, transforms=("jit",))
    assert explanation.regions[0].first_wrong.theirs.op == "aten.tanh"


class Renamed(torch.nn.Module):
    """A reference whose modules and parameters have names that say nothing."""

    def __init__(self, block):
        super().__init__()
        self.a = block

    def forward(self, x, ignored=None):
        return self.a(x, ignored)


def test_names_decide_nothing(explained):
    reference, port = pair(port=WrongEpsilon)
    renamed = parity.explain(
        Renamed(reference), port, (X, IGNORED), transforms=("jit",), gradients=False
    )
    told = [(r.first_wrong.theirs.op, [c.name for c in r.causes]) for r in renamed.regions]
    assert told == [("aten.native_layer_norm: add", ["epsilon"])]
