"""A run that starts in one framework goes on in the other as if it had stayed."""

import jax
import numpy as np
import optax
import pytest
import torch

from helpers.transfer.optimizer_runs import (
    AFTER,
    BEFORE,
    LAYOUT,
    ROWS,
    STEPS,
    D,
    H,
    N,
    by_definition,
    drawn,
    export,
    go_on_in_optax,
    go_on_in_torch,
    load,
    names_of,
    to_flax,
    torch_module,
    torch_weights,
)
from jax_attn.transfer import Layout, heads, row

WEIGHTS = drawn(1)
GRADIENTS = [drawn(seed) for seed in range(2, 2 + STEPS)]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def in_torch(case, gradients, weights=WEIGHTS, width=D):
    module = torch_module(weights, width)
    optimizer = case.torch(module)
    go_on_in_torch(module, optimizer, gradients)
    return module, optimizer


def from_torch_to_optax(case):
    module, optimizer = in_torch(case, GRADIENTS[:BEFORE])
    params = to_flax(torch_weights(module))
    names = names_of(module, optimizer)
    state = load(case.optax.init(params), optimizer.state_dict(), LAYOUT, names)
    params, _ = go_on_in_optax(case.optax, params, state, map(to_flax, GRADIENTS[BEFORE:]))
    return LAYOUT.to_torch(params)


def from_optax_to_torch(case):
    params = to_flax(WEIGHTS)
    state = case.optax.init(params)
    gradients = map(to_flax, GRADIENTS[:BEFORE])
    params, state = go_on_in_optax(case.optax, params, state, gradients)
    module = torch_module(LAYOUT.to_torch(params))
    optimizer = case.torch(module)
    carried = export(state, optimizer.state_dict(), LAYOUT, names_of(module, optimizer))
    optimizer.load_state_dict(carried)
    go_on_in_torch(module, optimizer, GRADIENTS[BEFORE:])
    return torch_weights(module)


def straight_in_torch(case):
    return torch_weights(in_torch(case, GRADIENTS)[0])


def worst(case, got, weights=WEIGHTS, gradients=GRADIENTS):
    """The largest error over what it may be, of any number of any parameter."""
    found = []
    for key, p in weights.items():
        want, budget = by_definition(case, key, p, [g[key] for g in gradients])
        found.append(np.max(np.abs(got[key] - want) / budget))
    assert len(found) == len(got) == 8
    return np.max(found)  # which a NaN does not get past


RUNS = {
    "straight in torch": straight_in_torch,
    "torch, then optax": from_torch_to_optax,
    "optax, then torch": from_optax_to_torch,
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_a_run_carried_over_is_the_run_by_definition(case, run):
    assert worst(case, run(case)) <= 1


@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_there_and_back_is_the_same_to_the_bit(case):
    module, optimizer = in_torch(case, GRADIENTS[:BEFORE])
    here, names = optimizer.state_dict(), names_of(module, optimizer)
    back = export(load(case.optax.init(to_flax(WEIGHTS)), here, LAYOUT, names), here, LAYOUT, names)
    assert back["param_groups"] == here["param_groups"]
    assert list(back["state"]) == list(range(8))
    for i, kept in here["state"].items():
        assert list(back["state"][i]) == list(kept)
        for name, tensor in kept.items():
            again = back["state"][i][name]
            assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(again, tensor)
            assert torch.equal(again.signbit(), tensor.signbit())
            assert again.data_ptr() != tensor.data_ptr()


SQUARE = N * H  # where a weight and its transpose are not told apart by shape
SQUARE_WEIGHTS = drawn(1, SQUARE)
SQUARE_GRADIENTS = [drawn(seed, SQUARE) for seed in range(2, 2 + STEPS)]
UNTURNED = Layout(
    *(group for group in LAYOUT.groups if "q_proj.weight" not in str(group)),
    row("q_proj.weight", "q_proj.kernel", heads),
)


def without_count(state):
    return optax.tree.set(state, count=np.int32(0))


def exchanged(state):
    adam, *rest = state
    return (adam._replace(mu=adam.nu, nu=adam.mu), *rest)


def mistaken(names):
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}
    return [
        [".".join(other.get(part, part) for part in key.split(".")) for key in group]
        for group in names
    ]


MISTAKES = {  # of the state, the table, the names
    "none": ("AdamW", lambda state: state, LAYOUT, list),
    "the count is forgotten": ("AdamW", without_count, LAYOUT, list),
    "mu and nu are exchanged": ("AdamW", exchanged, LAYOUT, list),
    "a transpose is left out": ("AdamW", lambda state: state, UNTURNED, list),
    "keys and values are exchanged": ("AdamW", lambda state: state, LAYOUT, mistaken),
    "the momentum is forgotten": (
        "momentum",
        lambda state: jax.tree.map(np.zeros_like, state),
        LAYOUT,
        list,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake):
    name, change, layout, naming = MISTAKES[mistake]
    case = ROWS[name]
    module, optimizer = in_torch(case, SQUARE_GRADIENTS[:BEFORE], SQUARE_WEIGHTS, SQUARE)
    params = to_flax(torch_weights(module), SQUARE)
    names = naming(names_of(module, optimizer))
    state = change(load(case.optax.init(params), optimizer.state_dict(), layout, names))
    gradients = [to_flax(gradient, SQUARE) for gradient in SQUARE_GRADIENTS[-AFTER:]]
    params, _ = go_on_in_optax(case.optax, params, state, gradients)
    found = worst(case, LAYOUT.to_torch(params), SQUARE_WEIGHTS, SQUARE_GRADIENTS)
    assert found <= 1 if mistake == "none" else not found <= 1e6  # or not a number
