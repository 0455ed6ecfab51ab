"""What a call changes in a module: compared through the table, and by a second call from there."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from helpers.parity.functions import PortFunction, TorchFunction
from helpers.parity.one_reference import Once
from jax_attn.parity import Verdict, check
from jax_attn.parity.run.inputs_and_runs import STATE, Inputs, float_dtype
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import LINEAR, Layout, export, ignored, load, row

B, D, F = 7, 5, 3
RUNNING = {"running_mean": "mean", "running_var": "var"}


class TorchNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.bn = torch.nn.Linear(D, F), torch.nn.BatchNorm1d(F)

    def forward(self, x):
        return self.bn(self.lin(x))


class BatchNorm(nnx.BatchNorm):
    """As torch has it: the running variance is unbiased."""

    def __call__(self, x):
        mean = x.mean(0)
        variance = jnp.square(x - mean).mean(0)
        if self.use_running_average:
            mean, variance = self.mean[...], self.var[...]
        else:
            for running, now in ((self.mean, mean), (self.var, variance * len(x) / (len(x) - 1))):
                running[...] = self.momentum * running[...] + (1 - self.momentum) * now
        normed = (x - mean) / jnp.sqrt(variance + self.epsilon)
        return normed * self.scale + self.bias


class FlaxNorm(nnx.Module):
    def __init__(self, norm=BatchNorm, momentum=0.9):
        rngs = nnx.Rngs(0)
        self.lin = nnx.Linear(D, F, rngs=rngs)
        self.bn = norm(F, momentum=momentum, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        return self.bn(self.lin(x))


def table(*, paired):
    """The rows of the pair, its running statistics in the table or passed over."""
    statistics = (
        row(f"bn.{key}", f"bn.{name}") if paired else ignored(f"bn.{key}", "written by hand")
        for key, name in RUNNING.items()
    )
    return Layout(
        LINEAR.under("lin", "lin"),
        row("bn.weight", "bn.scale"),
        row("bn.bias", "bn.bias"),
        ignored("bn.num_batches_tracked", "a counter that nothing reads"),
        *statistics,
    )


ONCE = Once()


@cache
def torch_norm(train):
    torch.manual_seed(0)
    reference = TorchNorm().train(train)
    reference.bn.running_mean += torch.linspace(-0.5, 0.5, F)
    reference.bn.running_var *= torch.linspace(0.5, 1.5, F)
    return reference


def normed(port, *, paired=True, train=True, **options):
    reference = torch_norm(train)
    load(port, reference.state_dict(), table(paired=paired))
    port.train() if train else port.eval()
    x = np.random.default_rng(0).standard_normal((B, D))
    return check(reference, port, (x,), layout=table(paired=paired), **options)


@pytest.mark.slow
def test_a_correct_batchnorm_passes_in_training_mode_with_its_statistics_compared():
    transforms = ("jit", "grad", "vmap", "remat")
    result = normed(FlaxNorm(), transforms=transforms)
    assert result.verdict is Verdict.PASS, str(result)
    labels = {(t.transform, t.label) for t in result.tensors}
    changed = {f"bn.{key} after the call" for key in RUNNING} | {"output of a second call"}
    assert {(name, label) for name in transforms for label in changed} < labels
    assert kinds(result, "note") == []


# a wrong port -> the tensors that show it.
WRONG = {
    "flax's momentum, torch's number": (FlaxNorm(momentum=0.1), {"running_mean", "running_var"}),
    "it forgets to update": (FlaxNorm(momentum=1.0), {"running_mean", "running_var"}),
    "a biased variance": (FlaxNorm(nnx.BatchNorm), {"running_var"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_running_statistics_fail_and_are_named(name, monkeypatch):
    ONCE.patch(monkeypatch)
    port, wrong = WRONG[name]
    result = normed(port, transforms=("jit",))
    assert result.verdict is Verdict.FAIL, str(result)
    failed = {t.label for t in result.tensors if t.verdict is Verdict.FAIL}
    assert failed == {f"bn.{key} after the call" for key in wrong}
    sentence = result.explain().sentence
    assert {key for key in RUNNING if f"bn.{key}" in sentence} == wrong, sentence


@pytest.mark.slow
def test_in_eval_mode_nothing_changes_and_nothing_is_said():
    result = normed(FlaxNorm(), train=False, transforms=("eager",))
    assert result.verdict is Verdict.PASS, str(result)
    assert not any("call" in t.label for t in result.tensors)
    assert kinds(result, "note") == []


@pytest.mark.slow
def test_statistics_that_no_row_pairs_are_named_in_a_note():
    result = normed(FlaxNorm(momentum=0.1), paired=False, transforms=("eager",))
    assert result.verdict is Verdict.PASS, str(result)
    assert kinds(result, "note") == ["state-not-compared"]
    assert sentences(result, "state-not-compared")[0].startswith(
        "the call changes buffers `bn.running_mean` and `bn.running_var` of the reference and "
        "variables `bn.mean` and `bn.var` of the port: not compared"
    )


def test_statistics_travel_through_a_table_both_ways_and_a_wrong_one_is_a_wrong_weight():
    reference, port = TorchNorm(), FlaxNorm()
    reference.bn.running_mean.add_(2)
    load(port, reference.state_dict(), table(paired=True))
    assert np.array_equal(port.bn.mean[...], reference.bn.running_mean)
    assert np.array_equal(export(port, table(paired=True))["bn.running_mean"], port.bn.mean[...])
    port.bn.mean[...] += 1
    port.eval()
    x = np.zeros((B, D), np.float32)
    options = {"layout": table(paired=True), "gradients": False, "transforms": ("eager",)}
    result = check(reference.eval(), port, (x,), **options)
    assert "'bn.running_mean' differs in 3 of 3 elements" in "\n".join(
        sentences(result, "weights-differ")
    )


class TorchAverage(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("average", torch.zeros(D, dtype=dtype))

    def forward(self, x):
        self.average.mul_(0.75).add_(0.25 * x.detach().mean(0))
        return 3 * x


class FlaxAverage(nnx.Module):
    def __init__(self, dtype, momentum):
        self.average, self.momentum = nnx.BatchStat(jnp.zeros(D, dtype)), momentum

    def __call__(self, x):
        old = self.momentum * self.average[...]
        self.average[...] = old + (1 - self.momentum) * x.mean(0)
        return 3 * x


@pytest.mark.parametrize("momentum", [0.75, 0.5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_state_is_rounded_as_its_dtype_keeps_it(dtype, momentum):
    reference = TorchAverage(getattr(torch, dtype))
    options = {"layout": Layout(row("average", "average")), "transforms": ("eager",)}
    x = np.random.default_rng(0).standard_normal((B, D))
    result = check(reference, FlaxAverage(dtype, momentum), (x,), dtype=dtype, **options)
    failed = [t.label for t in result.tensors if t.verdict is Verdict.FAIL]
    assert failed == ([] if momentum == 0.75 else ["average after the call"]), str(result)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torchs_own_statistics_are_within_their_budgets(dtype):
    """They are written inside a kernel, and rounded when they are kept."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(11).to(getattr(torch, dtype))
    x = np.random.default_rng(0).standard_normal((64, 11))
    reference = Reference(norm, None, Inputs.of((x,), float_dtype(dtype)))
    own, exact = reference.run(dtype, {}).kinds[STATE], reference.exact({}).kinds[STATE]
    budgets = reference.spread(dtype, {})[STATE]
    for key in RUNNING:
        assert (np.abs(own[key] - exact[key]) <= budgets[key].element).all()


# --- ports that remember --------------------------------------------------------------------------


def triple(x):
    return 3 * x


class Remembers(nnx.Module):
    """Adds what it was given before, kept in a Variable of this kind."""

    def __init__(self, kind=nnx.Variable):
        self.previous = kind(jnp.zeros((B, D)))

    def __call__(self, x):
        y = 3 * x + self.previous[...]
        self.previous[...] = x
        return y


class Counts(nnx.Module):
    """Not in a Variable."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return 3 * x if self.calls == 1 else 2 * x


class Draws(nnx.Module):
    def __init__(self, rate=0.5):
        self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(3 * x)


class Sows(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return 3 * x


class CannotBeCalledTwice(Remembers):
    def __call__(self, x):
        y = super().__call__(x)
        self.previous.set_value(self.previous[...][:0])
        return y


# a port -> the weight and kind of what is found, and what is said.
REMEMBER = {
    "the previous input": (
        Remembers(),
        ("failure", "second-call-differs"),
        "between calls the port keeps `previous`",
    ),
    "a number of Python's": (Counts(), ("failure", "second-call-differs"), "not Variables"),
    "a cache that goes on": (
        Remembers(nnx.Cache),
        ("doubt", "second-call-differs"),
        "nnx.Cache `previous` continues where the first call ended",
    ),
    "random numbers": (
        Draws(),
        ("failure", "draws-random"),
        "its random state `dropout.rngs.count`",
    ),
    "what no call can start from": (
        CannotBeCalledTwice(),
        ("note", "second-call-not-compared"),
        "a call leaves in `previous`",
    ),
}
VERDICTS = {"failure": Verdict.FAIL, "doubt": Verdict.INCONCLUSIVE, "note": Verdict.PASS}


def remembering(reference, port, **options):
    x = np.random.default_rng(0).standard_normal((B, D))
    return check(reference, port, (x,), **{"transforms": ("eager",), **options})


@pytest.mark.parametrize("name", REMEMBER)
def test_a_port_that_remembers_is_called_twice(name):
    port, (weight, kind), said = REMEMBER[name]
    result = remembering(TorchFunction(triple), port)
    assert result.verdict is VERDICTS[weight], str(result)
    assert kind in kinds(result, weight)
    assert said in "".join(sentences(result, kind))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_what_is_sown_for_others_to_read_is_no_state():
    result = remembering(TorchFunction(triple), Sows())
    assert result.verdict is Verdict.PASS
    assert {t.label for t in result.tensors} == {"output", "grad input 0"}


def test_the_same_compiled():
    result = remembering(TorchFunction(triple), Remembers(), transforms=("jit",), gradients=False)
    assert [t.label for t in result.tensors if t.verdict is Verdict.FAIL] == [
        "output of a second call"
    ]


class TorchRemembers(torch.nn.Module):
    def __init__(self, *, registered):
        super().__init__()
        if registered:
            self.register_buffer("previous", torch.zeros(B, D))
        else:
            self.previous = torch.zeros(B, D)

    def forward(self, x):
        y = 3 * x + self.previous.to(x.dtype)
        self.previous = x.detach()
        return y


# whether the reference's memory is a buffer, the port -> what is found, and what is said.
BOTH = {
    "both remember": (True, Remembers(), ("note", "state-not-compared"), "buffers `previous`"),
    "the port forgets": (
        True,
        PortFunction(triple),
        ("failure", "second-call-differs"),
        "the port keeps no state",
    ),
    "not in a buffer": (False, Remembers(), ("doubt", "second-call-differs"), "of its buffers"),
}


@pytest.mark.parametrize("name", BOTH)
def test_a_reference_that_remembers_is_called_twice_too(name):
    registered, port, (weight, kind), said = BOTH[name]
    result = remembering(TorchRemembers(registered=registered), port)
    assert result.verdict is VERDICTS[weight], str(result)
    assert kind in kinds(result, weight)
    assert said in "".join(sentences(result, kind))
