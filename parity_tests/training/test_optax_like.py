"""optax_like: what equals a torch optimizer, and every reason why nothing does."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.optim import LBFGS, SGD, Adam, AdamW, lr_scheduler

from jax_attn import parity, transfer
from jax_attn.training.optimizers.schedules import learning_rates, looked_up
from jax_attn.transfer import LINEAR, TransferError


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(5, 3)


def problems_of(act) -> dict[str, str]:
    with pytest.raises(TransferError) as error:
        act()
    return {p.name: p.text for p in error.value.problems}


REFUSED = {
    "amsgrad": (lambda p: Adam(p, amsgrad=True), "param_groups[0].amsgrad"),
    "differentiable": (lambda p: SGD(p, differentiable=True), "param_groups[0].differentiable"),
    "another optimizer": (lambda p: LBFGS(p), "torch_optimizer"),
    "a subclass": (
        lambda p: type("SGD", (SGD,), {"__module__": "mine"})(p, 0.1),
        "torch_optimizer",
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_has_no_equal_is_refused_by_name(row):
    make, name = REFUSED[row]
    assert name in problems_of(lambda: parity.optax_like(make(layer().parameters())))


def test_all_reasons_come_at_once():
    optimizer = Adam(layer().parameters(), 0.1, amsgrad=True, capturable=True)
    problems = problems_of(
        lambda: parity.optax_like(
            optimizer, clip_norm=1.0, clip_value=-1.0, accumulate=0, accumulated="max", steps=3
        )
    )
    assert problems.keys() == {
        "param_groups[0].amsgrad",
        "param_groups[0].capturable",
        "steps",
        "clip_norm, clip_value",
        "clip_value",
        "accumulate",
        "accumulated",
    }


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def ended(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, cycle_momentum=False)


def begun_chain(optimizer):
    return lr_scheduler.ChainedScheduler([begun(optimizer)])


def begun(optimizer):
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    optimizer.step()
    scheduler.step()
    return scheduler


@pytest.mark.parametrize("make", [plateau, ended])
def test_a_schedule_that_the_count_does_not_tell_is_refused(make):
    optimizer = SGD(layer().parameters(), 0.1, momentum=0.9)
    schedule = make(optimizer)
    assert "schedule" in problems_of(
        lambda: parity.optax_like(optimizer, schedule=schedule, steps=5)
    )


@pytest.mark.parametrize("make", [begun, begun_chain])
def test_a_schedule_that_has_begun_has_rates_from_its_count_on(make):
    optimizer = SGD(layer().parameters(), 0.5)
    schedule = make(optimizer)
    like = parity.optax_like(optimizer, schedule=schedule, steps=3)
    ones = {"kernel": jnp.ones((5, 3))}

    def moved(count):
        state = optax.tree.set(like.init(ones), count=jnp.int32(count))
        return float(like.update(ones, state, ones)[0]["kernel"][0, 0])

    assert [moved(count) for count in (1, 2, 3)] == pytest.approx([-0.5, -0.05, -0.05])
    assert np.isnan(moved(0))  # a new state does not go on from there


def test_a_scheduler_that_was_not_handed_in_is_missed():
    optimizer = SGD(layer().parameters(), 0.1)
    lr_scheduler.StepLR(optimizer, 2)
    assert "param_groups[0].lr" in problems_of(lambda: parity.optax_like(optimizer))


def test_the_rates_are_those_that_torch_updates_with_and_nan_beyond_them():
    optimizer = SGD(layer().parameters(), 0.1)
    first = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    then = lr_scheduler.StepLR(optimizer, 2, 0.5)
    schedule = lr_scheduler.SequentialLR(optimizer, [first, then], [2])
    (rates,), problems = learning_rates(schedule, 7)
    assert not problems
    used = []
    for _ in range(7):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    np.testing.assert_array_equal(rates, used)
    # torch multiplies each rate by a factor to get the next: two roundings a step, of seven.
    expected = [0.05, 0.075, 0.1, 0.1, 0.05, 0.05, 0.025]
    np.testing.assert_allclose(used, expected, rtol=7 * 2 * 2.0**-53)
    assert looked_up(rates)(jnp.array(6)) == np.float32(rates[6])
    assert np.isnan(looked_up(rates)(jnp.array(7)))


def test_each_path_gets_the_options_of_its_group_under_an_nnx_optimizer():
    """Weights decay, biases stand still: they are in no group."""
    reference = layer()
    optimizer = SGD([{"params": [reference.weight]}], 0.5, weight_decay=0.25)
    port = nnx.Linear(5, 3, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    before = np.array(port.kernel[...])
    like = parity.optax_like(optimizer, port=port, layout=LINEAR, names=["weight"])
    trained = nnx.Optimizer(port, like, wrt=nnx.Param)
    zero = nnx.state(port, nnx.Param)
    trained.update(
        port, nnx.from_flat_state([(k, v.replace(0 * v[...])) for k, v in nnx.to_flat_state(zero)])
    )
    # Decay, rate and difference are rounded, and so is what is expected: four roundings.
    np.testing.assert_allclose(port.kernel[...], before * (1 - 0.5 * 0.25), rtol=4 * 2.0**-24)
    np.testing.assert_array_equal(port.bias[...], 1.0)


def test_several_groups_need_the_table():
    module = layer()
    optimizer = AdamW([{"params": [module.weight]}, {"params": [module.bias], "weight_decay": 0.0}])
    assert "port, layout" in problems_of(lambda: parity.optax_like(optimizer))


def test_one_array_of_two_groups_is_refused():
    """q, k and v of three tensors, joined in one Flax array, of which one does not decay."""
    port = nnx.Linear(5, 6, use_bias=False, rngs=nnx.Rngs(0))
    table = transfer.Layout(
        transfer.row(("q.weight", "k.weight"), "kernel", transfer.joined, transfer.linear)
    )
    q, k = torch.nn.Parameter(torch.ones(3, 5)), torch.nn.Parameter(torch.ones(3, 5))
    optimizer = SGD([{"params": [q]}, {"params": [k], "weight_decay": 0.1}], 0.1)
    names = [["q.weight"], ["k.weight"]]
    problems = problems_of(
        lambda: parity.optax_like(optimizer, port=port, layout=table, names=names)
    )
    assert "kernel" in problems


@pytest.mark.slow
def test_numpys_numbers_are_numbers():
    """In the place of Python's: the same bits."""
    gradients = {"kernel": jnp.linspace(-1, 1, 15).reshape(5, 3)}

    def updated(of):
        optimizer = AdamW(layer().parameters(), of(0.5), (of(0.75), of(0.5)), weight_decay=of(0.25))
        like = parity.optax_like(optimizer, clip_norm=of(2.0))
        return like.update(gradients, like.init(gradients), gradients)[0]["kernel"]

    np.testing.assert_array_equal(updated(np.float64), updated(float))


def test_adams_state_is_optaxs_own():
    """So that `transfer.load_optimizer` fills it."""
    state = parity.optax_like(Adam(layer().parameters())).init({"kernel": jnp.ones((5, 3))})
    assert isinstance(state[0], optax.ScaleByAdamState)
