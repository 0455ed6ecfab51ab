"""check_training's options: right ones are taken, wrong ones refused, idle ones not vouched for."""

import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.optim import SGD, AdamW, lr_scheduler

from helpers.parity.training_checks import adamw, linear_check, sgd
from jax_attn.parity.judge.compare import Verdict
from jax_attn.selfcheck.training_bugs.cases import batches, layers


def of_one_cycle(optimizer, updates: int):
    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=updates, cycle_momentum=False)


def chained(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1, 4),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.ChainedScheduler(parts)


def a_batch(**changed) -> dict:
    return batches()[0] | changed


REFUSED = {
    "no accumulation": ({"accumulate": 0}, "accumulate: expected a whole number above 0"),
    "unknown accumulation": ({"accumulated": "avg"}, "accumulated: expected 'sum' or 'mean'"),
    "clipped to nothing": ({"clip_norm": 0}, "clip_norm: expected a number above 0"),
    "a schedule by the loss": (
        {"schedule": lr_scheduler.ReduceLROnPlateau},
        "schedule: expected rates that follow from the count alone",
    ),
    "no schedule": ({"schedule": id}, "schedule: expected it to make a torch scheduler, got int"),
    "a schedule that ends": (
        {"schedule": lambda o: of_one_cycle(o, 2), "steps": 3},
        "schedule: expected rates for 3 updates, got OneCycleLR's for 2",
    ),
    "no batch": ({"batches": []}, "batches: expected a list"),
    "no target": ({"batches": [{"input": batches()[0]["input"]}]}, "'target'"),
    "a list for an array": ({"batches": [a_batch(input=[1.0])]}, "batches[0]['input']"),
    "other shapes": (
        {"batches": [a_batch(), a_batch(input=np.ones((2, 5), np.float32))]},
        "batches[1]: expected one set of shapes",
    ),
    "a target of another shape": (
        {"batches": [a_batch(target=np.ones((2, 2), np.float32))]},
        "['target']: expected shape",
    ),
    "no optimizer": ({"optimizer": id}, "optimizer: expected it to make a torch.optim optimizer"),
    "unknown loss": ({"loss": "hinge"}, "loss: expected one of cross_entropy, mse"),
    "half a loss": ({"loss": abs}, "loss: expected torch's and JAX's"),
    "no steps": ({"steps": 0}, "steps: expected a whole number above 0"),
    "unknown dtype": ({"dtype": "int8"}, "dtype: expected one of"),
    "another dtype": ({"dtype": "bfloat16"}, "reference parameter 'weight': expected bfloat16"),
    "float64 narrowed": ({"dtype": "float64"}, "x64"),
}


TAKEN = {
    "a chain of schedules": {"schedule": lambda o: chained(o), "steps": 3},
    "a schedule that ends with the run": {"schedule": lambda o: of_one_cycle(o, 2), "steps": 2},
    "NumPy's numbers": {
        "optimizer": lambda m: SGD(m.parameters(), np.float64(0.1)),
        "clip_norm": np.float32(0.5),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("row", TAKEN)
def test_a_recipe_that_torch_takes_is_taken(row):
    result = linear_check(**TAKEN[row])
    assert result.verdict is Verdict.PASS, str(result)


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_checked_is_refused_by_name(row):
    changed, expected = REFUSED[row]
    with pytest.raises(ValueError, match="expected") as error:
        linear_check(**changed)
    assert expected in str(error.value)


def test_every_reason_comes_at_once():
    with pytest.raises(ValueError, match="expected") as error:
        linear_check(
            loss="hinge", steps=-1, batches=[], clip_value=-1.0, port_optimizer=optax.sgd(0.1)
        )
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "batches",
        "loss",
        "steps",
        "clip_value",
    ]


def test_an_optimizer_of_flaxs_is_refused_where_optaxs_is_taken():
    trained = nnx.Optimizer(layers("float32")[1], optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"port_optimizer: expected an optax.*got Op"):
        linear_check(port_optimizer=trained)


def test_an_optimizer_of_the_module_itself_is_refused_as_copies_are_trained():
    with pytest.raises(TypeError, match="optimizer: expected a function of the module"):
        linear_check(optimizer=sgd(layers("float32")[0]))


class Dropping(torch.nn.Linear):
    def forward(self, input):
        return torch.nn.functional.dropout(super().forward(input), 0.5)


class Frozen(torch.nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.bias.requires_grad_(False)


class Unused(torch.nn.Linear):
    def forward(self, input):
        return input @ self.weight.T


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Dropping, "reference: expected the same loss each time"),
        (Frozen, "reference parameter 'bias': expected it to be trained"),
        (Unused, "reference parameter 'bias': expected a gradient, got none"),
    ],
)
def test_a_reference_that_would_not_train_as_the_port_does_is_refused(kind, expected):
    reference = kind(5, 3)
    reference.load_state_dict(layers("float32")[0].state_dict())
    with pytest.raises(ValueError, match="expected") as error:
        linear_check(reference=reference)
    assert expected in str(error.value)


def scheduled(kind, *args):
    return lambda optimizer: kind(optimizer, *args)


def decaying(weight_decay: float):
    return lambda m: AdamW(m.parameters(), 1e-3, weight_decay=weight_decay)


# What is changed, the doubt's kind, what it names.
BLIND = {
    "a norm that no gradient reaches": (
        {"clip_norm": 1e3},
        "option-left-out",
        "clip_norm=1000.0 left out, because the largest gradient norm of the first 3 updates is 2",
    ),
    "a value that no element reaches": ({"clip_value": 1e2}, "option-left-out", "clip_value=100.0"),
    "a step after the last": (
        {"schedule": scheduled(lr_scheduler.StepLR, 30)},
        "option-left-out",
        "schedule left out, because the rate hardly changes in 5 updates",
    ),
    "a slow cosine": (
        {"schedule": scheduled(lr_scheduler.CosineAnnealingLR, 10**5), "optimizer": sgd},
        "option-left-out",
        "schedule",
    ),
    "decay within rounding": (
        {"optimizer": decaying(1e-5)},
        "option-left-out",
        "weight_decay=1e-05",
    ),
    "no rate": ({"optimizer": lambda m: SGD(m.parameters(), 0.0)}, "no-update", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", BLIND)
def test_an_option_that_never_acts_is_not_vouched_for(row):
    changed, kind, named = BLIND[row]
    result = linear_check(**({"optimizer": adamw, "steps": 5} | changed))
    assert result.verdict is Verdict.INCONCLUSIVE, str(result)
    assert [doubt.kind for doubt in result.doubts] == [kind]
    assert named in result.doubts[0]


ACTING = {
    "a norm that gradients reach": {"clip_norm": 1.0},
    "a value that elements reach": {"clip_value": 0.5},
    "a step after the third update": {"schedule": scheduled(lr_scheduler.StepLR, 4), "steps": 6},
    "decay at its default": {"optimizer": decaying(0.01)},
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ACTING)
def test_an_option_that_acts_is(row):
    result = linear_check(**ACTING[row])
    assert result.verdict is Verdict.PASS, str(result)


@pytest.mark.slow
def test_an_eps_beside_which_no_gradient_is_small_is_noted():
    (note,) = linear_check(optimizer=adamw).notes
    assert note.kind == "option-left-out"
    assert "eps=1e-08" in note
