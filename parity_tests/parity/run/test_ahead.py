"""Programs compiled ahead in a thread: what is left to runs, and what the thread leaves alone."""

import threading
from collections import Counter
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_attn.parity.run import ahead
from jax_attn.parity.run.ahead import compiled_ahead
from jax_attn.parity.run.call_side import RaisedError
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port, full_precision

COMPILED = "/jax/core/compile/backend_compile_duration"
X = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
D_OUT = {"output": np.ones((3, 7), np.float32)}
CALLED_IN: Counter[threading.Thread] = Counter()
"""The thread of each call of a module, and of each callback on arrays."""


def _called(*arrays):
    CALLED_IN[threading.current_thread()] += 1
    return arrays[0]


@jax.custom_vjp
def identity(y):
    return y


def _backward(_, d_out):
    """Backward, a callback and a loop that zeros would not end."""
    total = jax.lax.while_loop(lambda n: n < 2, lambda n: n + abs(d_out).sum(), 0.0)
    return (jax.pure_callback(_called, d_out, d_out) * jnp.minimum(total, 1),)


identity.defvjp(lambda y: (y, None), _backward)


class Layer(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(5, 7, rngs=nnx.Rngs(0))

    def __call__(self, x):
        _called(x)
        return identity(jnp.tanh(self.linear(x)) ** 3)


class Raises(nnx.Module):
    def __call__(self, x):
        raise ArithmeticError("no such layer")


@pytest.fixture
def finished(monkeypatch):
    """Let the thread finish before a run begins."""

    def submit(pool, *args):
        submitted(pool, *args)
        pool.submit(int).result()

    submitted = ahead._submit
    monkeypatch.setattr(ahead, "_submit", submit)


@pytest.fixture
def compiled():
    """Whether in this thread -> the names of the programs compiled there."""
    names, here = {True: set(), False: set()}, threading.current_thread()

    def note(event, seconds, *, fun_name="", **_):
        if event == COMPILED:
            names[threading.current_thread() is here].add(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def run(port, transform, before):
    """The run, as a check makes it, with nothing compiled yet."""
    jax.clear_caches()
    with before, full_precision():
        return port.run("float32", D_OUT, transform)


AHEAD = {"jit": {"jit(step)"}, "eager": {"jit(transpose)"}}
"""Transform -> programs of the port that its run leaves to the thread, each of one place only."""


@pytest.mark.slow
@pytest.mark.parametrize("transform", AHEAD)
def test_a_run_gives_the_same_bits_and_compiles_less(transform, finished, compiled):
    port = Port(Layer(), None, Inputs((X,), {}))
    want = run(port, transform, nullcontext())
    assert compiled[True] >= AHEAD[transform]
    assert not compiled[False]
    compiled[True].clear()
    got = run(port, transform, compiled_ahead(port, "float32", D_OUT, (transform,)))
    assert compiled[False] >= AHEAD[transform]
    assert not compiled[True] & AHEAD[transform]
    for kind, arrays in want.kinds.items():
        for name, array in arrays.items():
            assert np.array_equal(got.kinds[kind][name], array)


@pytest.mark.slow
def test_a_second_run_traces_the_port_again():
    port = Port(Layer(), None, Inputs((X,), {}))
    with compiled_ahead(port, "float32", D_OUT, ("jit",)):
        run(port, "jit", nullcontext())
        CALLED_IN.clear()
        run(port, "jit", nullcontext())
    assert CALLED_IN.total() > 1


@pytest.mark.slow
def test_the_thread_runs_nothing_of_the_users(finished):
    CALLED_IN.clear()
    with compiled_ahead(Port(Layer(), None, Inputs((X,), {})), "float32", D_OUT, ("eager", "jit")):
        pass
    assert set(CALLED_IN) == {threading.current_thread()}


def test_what_a_port_raises_is_left_to_its_run():
    port = Port(Raises(), None, Inputs((X,), {}))
    with (
        compiled_ahead(port, "float32", D_OUT, ("eager", "jit")),
        pytest.raises(RaisedError, match="no such layer"),
    ):
        port.run("float32", D_OUT, "jit")
