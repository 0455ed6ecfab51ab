"""`Result.explain` of a training that fails: what is wrong first, and under which recipe it is
right."""

import json
from functools import partial

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.optim import SGD, Adam, AdamW

from helpers.parity.training_checks import adamw, linear_check
from helpers.schema_problems import problems
from jax_attn import GroupedQueryAttention, parity, transfer
from jax_attn.parity.judge.text import finite
from jax_attn.selfcheck.training_bugs.cases import judge_case
from jax_attn.selfcheck.training_bugs.optimizer_bugs import OPTIMIZER_BUGS
from torch_ref import DESIGNS

CAUSES = {
    "SGD: a rate 1% too large": ("rate", "1.01"),
    "SGD: momentum ignored": ("option", "momentum=0.0 in place of 0.9"),
    "SGD: dampening ignored": ("option", "dampening=0.0 in place of 0.3"),
    "SGD: Nesterov ignored": ("option", "nesterov=False"),
    "SGD: Nesterov unasked": ("option", "nesterov=True"),
    "SGD: weight decay left out": ("option", "weight_decay=0.0 in place of 0.2"),
    "SGD: maximize ignored": ("option", "maximize=False"),
    "Adam: betas swapped": ("option", "betas=(0.999, 0.9) in place of (0.9, 0.999)"),
    "Adam: b2 0.99 for 0.999": ("option", "betas=(0.9, 0.99) in place of (0.9, 0.999)"),
    "Adam: decay decoupled": ("option", "decoupled_weight_decay=True"),
    "Adam: bias correction left out": ("schedule", "which the reference lacks"),
    "AdamW: decay without the learning rate": ("option", "weight_decay=10.0 in place of 0.2"),
    "clip by norm: eps left out": ("option", "clip_norm=1e-05 without the 1e-6"),
    "AdamW: decay coupled": ("option", "decoupled_weight_decay=False"),
    "AdamW: optax's own decay": ("option", "weight_decay=0.0001 in place of 0.2"),
    "AdamW: biases decay too": (
        "option",
        "weight_decay=0.3 in every group in place of 0.3, 0.0",
    ),
    "NAdam: momentum decay left out": ("option", "momentum_decay=0.0 in place of 0.1"),
    "NAdam: decay coupled": ("option", "decoupled_weight_decay=False"),
    "RMSprop: optax's own decay": ("option", "alpha=0.9 in place of 0.99"),
    "RMSprop: not centred": ("option", "centered=False"),
    "Adagrad: lr_decay left out": ("option", "lr_decay=0.0 in place of 0.3"),
    "clip by value: left out": ("option", "clip_value"),
    "cosine: off by one": ("schedule", "one update ahead"),
    "warm-up: off by one": ("schedule", "one update ahead"),
    "warm-up by a function: off by one": ("schedule", "one update ahead"),
    "steps: off by one": ("schedule", "one update ahead"),
    "accumulated: mean for sum": ("accumulation", "as their mean"),
    "accumulated: sum for mean": ("accumulation", "as their sum"),
}
"""Bug of an optimizer -> its cause's kind, what it names; no recipe of torch's has the others."""


def pytest_generate_tests(metafunc):
    """Every sixth bug; all with --long."""
    if "bug" in metafunc.fixturenames:
        every = metafunc.config.getoption("--long")
        metafunc.parametrize("bug", list(OPTIMIZER_BUGS)[:: 1 if every else 6])


@pytest.mark.slow
def test_wrong_updates_have_the_recipe_that_makes_them(bug):
    planted = OPTIMIZER_BUGS[bug]
    explanation = judge_case(planted.case, planted.make()).explain()
    assert explanation.verdict == "FAIL"
    document = json.loads(json.dumps(finite(explanation.to_json()) | {"text": ""}))
    assert [*problems(document, "explanation")] == []
    if bug not in CAUSES:
        assert explanation.causes == ()
        assert explanation.first_wrong.transform.startswith("update ")
        return
    kind, named = CAUSES[bug]
    (cause,) = explanation.causes
    assert cause.kind == f"recipe-{kind}"
    assert named in cause
    assert explanation.sentence.endswith(f"would with {cause}.")


MATRICES = {"mask": lambda params: jax.tree.map(lambda a: a.ndim > 1, params)}
COUPLED = optax.add_decayed_weights(0.2)
FITTED = {
    # torch's optimizer, the port's, what the cause says
    "another decay": (AdamW, optax.adamw(0.02, weight_decay=0.05), "weight_decay=0.05 in place"),
    "decay of matrices alone": (
        AdamW,
        optax.adamw(0.02, weight_decay=0.2, **MATRICES),
        "weight_decay=0.0 of all but matrices in place of 0.2",
    ),
    "coupled": (AdamW, optax.chain(COUPLED, optax.adam(0.02)), "decoupled_weight_decay=False"),
    "apart from the momentum": (
        partial(SGD, momentum=0.9),
        optax.chain(optax.trace(0.9), COUPLED, optax.scale(-0.02)),
        "a weight decay apart from the gradient",
    ),
    "another way, and optax's default": (
        Adam,
        optax.adamw(0.02, weight_decay=0.01),
        "decoupled_weight_decay=True in place of False and weight_decay=0.01 in place of 0.2",
    ),
    "a rate and a decay": (
        AdamW,
        optax.adamw(0.06, weight_decay=0.05),
        "weight_decay=0.05 in place of 0.2 and a learning rate 3 times as large",
    ),
    "a clip of the port alone": (
        AdamW,
        optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.02, weight_decay=0.2)),
        "clip_norm=0.3, which the reference lacks",
    ),
    "a clip by value of the port alone": (
        SGD,
        optax.chain(optax.clip(0.1), COUPLED, optax.sgd(0.02)),
        "clip_value=0.1, which the reference lacks",
    ),
    "a schedule of the port alone": (
        AdamW,
        optax.adamw(optax.linear_schedule(0.002, 0.02, 4), weight_decay=0.2),
        "a schedule, which the reference lacks: its rates are 0.1, 0.325 and 0.55 times",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED)
def test_numbers_of_a_recipe_are_fitted_to_the_ports_updates(name):
    kind, own, said = FITTED[name]
    result = linear_check(
        optimizer=lambda m: kind(m.parameters(), lr=0.02, weight_decay=0.2),
        port_optimizer=own,
        steps=3,
    )
    (cause,) = result.explain().causes
    assert said in cause


@pytest.mark.slow
def test_a_step_of_a_schedule_after_the_updates_from_identical_gradients_is_found():
    late = optax.piecewise_constant_schedule(0.1, {4: 0.5})
    result = linear_check(
        optimizer=lambda m: SGD(m.parameters(), 0.1), port_optimizer=optax.sgd(late), steps=6
    )
    assert {t.transform[:4] for t in result.tensors if t.verdict == "FAIL"} <= {"step", "loss"}
    (cause,) = result.explain().causes
    assert cause.kind == "recipe-schedule"
    assert "its rates are 1, 1, 1, 1 and 0.5 times" in cause


def test_of_a_right_training_nothing_differs():
    explanation = judge_case("SGD").explain()
    assert (explanation.verdict, explanation.regions, explanation.causes) == ("PASS", (), ())


class Scaled(nnx.Module):
    """Attention whose result is 3% too large."""

    def __init__(self):
        self.attention = GroupedQueryAttention(13, 6, 3, head_dim=5, rngs=nnx.Rngs(0))

    def __call__(self, query: jax.Array) -> jax.Array:
        return self.attention(query) * 1.03


@pytest.mark.slow
def test_wrong_gradients_are_explained_as_those_of_a_check_are():
    torch.manual_seed(0)
    reference, port = DESIGNS["gqa"](13, 6, 3, head_dim=5), Scaled()
    layout = transfer.LAYOUTS["gqa"].under("", "attention")
    transfer.load(port, reference.state_dict(), layout)
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((3, 7, 13), np.float32) for name in ("query", "target")}
    result = parity.check_training(
        reference, port, [batch], layout=layout, optimizer=adamw, loss="mse", steps=3
    )
    explanation = result.explain()
    (cause, *_) = explanation.regions[0].causes
    assert (cause.name, cause.value) == ("scale", pytest.approx(1.03, rel=1e-4))
    assert explanation.first_wrong.kind == "gradient of parameter"
