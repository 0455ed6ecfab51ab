"""Causes that have a name: other numbers each time, inputs that reach no parameter, padding."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from helpers.parity.functions import PortFunction, TorchFunction
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking.canaries import try_canaries
from jax_attn.parity.checking.judging import not_finite_under_some
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import EMBEDDING, LINEAR, load

B, D, F, E = 3, 5, 7, 4


# --- other numbers each time ----------------------------------------------------------------------


TRIPLE = TorchFunction(lambda x: 3 * x)


def draws_on_the_host(x):
    """As a port with NumPy's random numbers in its dropout."""
    return 3 * x * (np.random.default_rng().random(x.shape) > 0.5)


# a wrong port -> whether it gives other numbers each time.
PORTS = {
    "draws on the host": (PortFunction(draws_on_the_host), True),
    "wrong alike each time": (PortFunction(lambda x: 2 * x), False),
}


@pytest.mark.parametrize("name", PORTS)
def test_a_port_that_gives_other_numbers_each_time_is_told_so_first(name):
    port, differs = PORTS[name]
    x = np.random.default_rng(0).standard_normal((B, D))
    result = check(TRIPLE, port, (x,), transforms=("eager", "jit"))
    assert result.verdict is Verdict.FAIL
    told = sentences(result, "other-numbers")
    assert told == list(result.reasons[: len(told)])
    said = "the port gives other numbers each time: two runs of the same module on the same inputs"
    starts = [f"{name}: {said} differ in `output`" for name in ("eager", "jit") if differs]
    assert [line[: len(start)] for line, start in zip(told, starts, strict=True)] == starts


def test_a_port_that_passes_is_run_once():
    times = itertools.count()

    def counted(x):
        jax.debug.callback(lambda: next(times))
        return 3 * x

    x = np.ones((B, D))
    options = {"gradients": False, "transforms": ("eager",)}
    assert check(TRIPLE, PortFunction(counted), (x,), **options).verdict is Verdict.PASS
    jax.effects_barrier()
    assert next(times) == 1


# --- parameters that nothing reaches --------------------------------------------------------------


class TorchExperts(torch.nn.Module):
    """Each row goes to the expert that it names; the weights of all in one parameter, or apart."""

    def __init__(self, *, stacked):
        super().__init__()
        drawn = torch.randn(E, F, D, generator=torch.Generator().manual_seed(0))
        self.stacked = stacked
        if stacked:
            self.up = torch.nn.Parameter(drawn)
        else:
            self.experts = torch.nn.ParameterList(drawn.unbind())

    def forward(self, x, expert):
        up = self.up if self.stacked else torch.stack(list(self.experts))
        return torch.einsum("bd,bfd->bf", x, up[expert])


class FlaxExperts(nnx.Module):
    def __init__(self):
        self.up = nnx.Param(jnp.zeros((E, F, D)))

    def __call__(self, x, expert):
        return jnp.einsum("bd,bfd->bf", x, self.up[...][expert])


# stacked, the expert of each row -> what no input reaches.
ROUTED = {
    "stacked, two of four": (True, [0, 2, 2], ["up[1]", "up[3]"]),
    "apart, two of four": (False, [0, 2, 2], ["experts.1", "experts.3"]),
    "stacked, all": (True, [0, 1, 2, 3], []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTED)
def test_parameters_that_no_input_reaches_are_named(name):
    stacked, expert, missed = ROUTED[name]
    reference, port = TorchExperts(stacked=stacked), FlaxExperts()
    rows = reference.up if stacked else reference.experts
    order = [0, 3, 2, 1] if missed else [0, 1, 2, 3]  # two are swapped, where none is reached
    port.up[...] = jnp.stack([rows[i].detach().numpy() for i in order])
    x = np.random.default_rng(0).standard_normal((len(expert), D))
    inputs = (x, np.array(expert, np.int32))
    result = check(reference, port, inputs, transforms=("eager",))
    assert result.verdict is Verdict.PASS, str(result)
    told = sentences(result, "unreached-weights")
    assert len(told) == bool(missed)
    assert all(f"`{part}`" in told[0] for part in missed), told
    result = check(reference, port, inputs, transforms=("eager",), gradients=False)
    assert "unreached-weights" not in kinds(result), "its own note says what was not looked at"


class TorchCentered(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)


class FlaxCentered(nnx.Linear):
    def __call__(self, x):
        y = super().__call__(x)
        return y - y.mean(0)


@pytest.mark.slow
def test_a_gradient_that_is_only_rounding_is_a_standing_note():
    reference, port = TorchCentered(D, F), FlaxCentered(D, F, rngs=nnx.Rngs(0))
    load(port, reference.state_dict(), LINEAR)
    x = np.random.default_rng(0).standard_normal((B, D))
    result = check(reference, port, (x,), layout=LINEAR, transforms=("eager",), strict=True)
    assert result.verdict is Verdict.PASS, str(result)
    (note,) = sentences(result, "zero-gradient")
    assert note.startswith("the gradient of `bias` is zero up to rounding")


# --- the row of padding ---------------------------------------------------------------------------


V, PAD = 7, 2


class TorchEmbedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(V, D, padding_idx=PAD)
        with torch.no_grad():
            self.table.weight[PAD] = 1

    def forward(self, tokens):
        return 3 * self.table(tokens)


class FlaxEmbedding(nnx.Module):
    """stopped: the tokens that get no gradient."""

    def __init__(self, stopped=()):
        self.table = nnx.Embed(V, D, rngs=nnx.Rngs(0))
        self.stopped = stopped

    def __call__(self, tokens):
        y = self.table(tokens)
        is_stopped = jnp.isin(tokens, jnp.array(self.stopped, jnp.int32))[..., None]
        return 3 * jnp.where(is_stopped, jax.lax.stop_gradient(y), y)


# tokens, those that the port stops -> whether it passes, whether the row of padding is noted.
PADDED = {
    "flax's Embed": ([0, PAD, 5, PAD], (), True, True),
    "no padding among the tokens": ([0, 1, 5], (), True, False),
    "as torch has it": ([0, PAD, 5], (PAD,), True, False),
    "wrong elsewhere": ([0, PAD, 5], (5,), False, False),
    "wrong there and elsewhere": ([0, PAD, 5], (PAD, 5), False, False),
}


@pytest.mark.parametrize("name", PADDED)
def test_the_row_of_padding_is_left_out_where_it_alone_differs(name):
    tokens, stopped, passes, noted = PADDED[name]
    reference, port = TorchEmbedding(), FlaxEmbedding(stopped)
    layout = EMBEDDING.under("table", "table")
    load(port, reference.state_dict(), layout)
    inputs = (np.array([tokens, tokens[::-1]], np.int32),)
    result = check(reference, port, inputs, layout=layout, transforms=("eager",))
    assert result.verdict is (Verdict.PASS if passes else Verdict.FAIL), str(result)
    note = f"row {PAD} of grad table.weight, its padding_idx, was not compared"
    assert [n.startswith(note) for n in sentences(result, "padding-row")] == [True] * noted
    assert kinds(result, "note") == []  # none that inputs could remove, so that `strict` passes


class Routed(torch.nn.Module):
    """Each token by one of two layers, as its first number is above 0 or not."""

    def __init__(self):
        super().__init__()
        self.low, self.high = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        y, high = torch.zeros_like(x), x[..., 0] > 0
        y[high], y[~high] = self.high(x[high]), self.low(x[~high])
        return y


@pytest.mark.parametrize("routed", [False, True])
def test_layers_that_no_token_is_routed_to_are_named_without_gradients(routed):
    x = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float32)
    x[..., 0] = -np.abs(x[..., 0])
    x[0, 0, 0] *= -1 if routed else 1
    inputs = Inputs((x,), {})
    side = Prepared(Reference(Routed(), None, inputs), "float32", gradients=False)
    notes = [note for note in try_canaries(side).notes if note.kind == "unreached-weights"]
    assert [note.split(":")[0] for note in notes] == (
        [] if routed else ["no input reaches `high.weight` and `high.bias`"]
    )


@pytest.mark.parametrize("scaled_first", [False, True])
def test_a_filled_row_that_only_a_compiled_softmax_loses_says_what_to_write(scaled_first):
    """The mask fills every key of the last query, before or after the scale."""
    fill = np.where(np.tril(np.ones((7, 7), bool)), 0, np.finfo(np.float32).min)
    fill[-1] = np.finfo(np.float32).min

    def attention(softmax, fill, x):
        scores, c = x @ x.mT, 5**0.5
        return softmax(scores / c + fill if scaled_first else (scores + fill) / c, -1) @ x

    reference = TorchFunction(partial(attention, torch.softmax, torch.from_numpy(fill)))
    port = PortFunction(partial(attention, jax.nn.softmax, fill))
    x = np.random.default_rng(0).standard_normal((2, 7, 5)).astype(np.float32)
    result = check(reference, port, (x,), gradients=False)
    assert kinds(result).count("finite-under-some") == (not scaled_first), str(result)


def test_a_compiled_softmax_is_named_only_where_outputs_are_lost_compiled():
    (line,) = not_finite_under_some({"eager": True, "jit": False})
    assert "finite under eager and not under jit" in line
    assert "softmax" in line
    (line,) = not_finite_under_some({"eager": False, "jit": True})
    assert "finite under jit and not under eager" in line
    assert "softmax" not in line
