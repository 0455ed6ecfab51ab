"""`Result.explain` of a training that fails: what is wrong first, and under which recipe it is
right."""

import json

import jax
import optax
import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Rprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from helpers.parity.training_checks import linear_check
from helpers.schema_problems import problems
from jax_attn import transfer
from jax_attn.parity.judge.text import finite
from jax_attn.selfcheck.training_bugs.cases import IN, OUT, judge_case, layers
from jax_attn.selfcheck.training_bugs.optimizer_bugs import OPTIMIZER_BUGS
from jax_attn.training.optimizers.optax_like import optax_like
from jax_attn.training.optimizers.terms import clip_by_norm
from jax_attn.transfer import ignored

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
CLIPPED = clip_by_norm(0.3)  # as torch clips, whose norms here are larger


def decaying(kind, decay=0.2, lr=0.02, **options):
    return lambda m: kind(m.parameters(), lr=lr, weight_decay=decay, **options)


def one_cycle(optimizer):
    """Cycle the rate, and the momentum."""
    return OneCycleLR(optimizer, 0.04, total_steps=7)


def warm_up(optimizer):
    """Begin with a rate of 0."""
    return LambdaLR(optimizer, lambda t: t / 4)


def weight_alone(m):
    """Omit the bias."""
    return AdamW([m.weight], lr=0.02, weight_decay=0.2)


def still_bias(m):
    """Have a bias whose decay does not show, because its rate is 0."""
    groups = [{"params": [m.weight]}, {"params": [m.bias], "lr": 0.0, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.02, weight_decay=0.2)


def frozen_bias(tx):
    return optax.multi_transform(
        {"trained": tx, "frozen": optax.set_to_zero()}, {"kernel": "trained", "bias": "frozen"}
    )


def like(optimizer, schedule):
    """Return the optax transformation of a recipe of torch's."""
    own = optimizer(layers("float32")[0])
    return optax_like(own, schedule=schedule(own), steps=3)


FITTED = {
    # torch's optimizer, the port's, what the cause says, options of the reference's recipe
    "another decay": (
        decaying(AdamW),
        optax.adamw(0.02, weight_decay=0.05),
        "weight_decay=0.05 in place of 0.2",
    ),
    "decay of matrices alone": (
        decaying(AdamW),
        optax.adamw(0.02, weight_decay=0.2, **MATRICES),
        "weight_decay=0.0 of all but matrices in place of 0.2",
    ),
    "a parameter that the optimizer omits": (
        weight_alone,
        frozen_bias(optax.adamw(0.02, weight_decay=0.05)),
        "weight_decay=0.05 in place of 0.2",
    ),
    "a decay that does not show": (
        still_bias,
        frozen_bias(optax.adamw(0.02, weight_decay=0.05)),
        "weight_decay=0.05 of matrices in place of 0.2",
    ),
    "coupled": (
        decaying(AdamW),
        optax.chain(COUPLED, optax.adam(0.02)),
        "decoupled_weight_decay=False in place of True",
    ),
    "apart from the momentum": (
        decaying(SGD, momentum=0.9),
        optax.chain(optax.trace(0.9), COUPLED, optax.scale(-0.02)),
        "a weight decay apart from the gradient",
    ),
    "another way, and optax's default": (
        decaying(Adam),
        optax.adamw(0.02, weight_decay=0.01),
        "decoupled_weight_decay=True in place of False and weight_decay=0.01 in place of 0.2",
    ),
    "a rate and a decay": (
        decaying(AdamW),
        optax.adamw(0.06, weight_decay=0.05),
        "weight_decay=0.05 in place of 0.2 and a learning rate 3 times as large",
    ),
    "a clip of the port alone": (
        decaying(AdamW),
        optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.02, weight_decay=0.2)),
        "clip_norm=0.3, which the reference lacks",
    ),
    "another clip": (
        decaying(AdamW),
        optax.chain(optax.clip_by_global_norm(0.4), optax.adamw(0.02, weight_decay=0.2)),
        "clip_norm=0.4 in place of 0.3",
        {"clip_norm": 0.3},
    ),
    "own clip kept, decay of matrices": (
        decaying(AdamW),
        optax.chain(CLIPPED, optax.adamw(0.02, weight_decay=0.2, **MATRICES)),
        "weight_decay=0.0 of all but matrices in place of 0.2",
        {"clip_norm": 0.3},
    ),
    "own clip kept, a rate": (
        decaying(AdamW),
        optax.chain(CLIPPED, optax.adamw(0.06, weight_decay=0.05)),
        "weight_decay=0.05 in place of 0.2 and a learning rate 3 times as large",
        {"clip_norm": 0.3},
    ),
    "own clip without its eps, a decay": (
        decaying(AdamW),
        optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.02, weight_decay=0.05)),
        "weight_decay=0.05 in place of 0.2 and clip_norm=0.3 without the 1e-6 that torch adds to "
        "the norm",
        {"clip_norm": 0.3},
    ),
    "a clip by value of the port alone": (
        decaying(SGD),
        optax.chain(optax.clip(0.1), COUPLED, optax.sgd(0.02)),
        "clip_value=0.1, which the reference lacks",
    ),
    "a schedule of the port alone": (
        decaying(AdamW),
        optax.adamw(optax.linear_schedule(0.002, 0.02, 4), weight_decay=0.2),
        "a schedule, which the reference lacks: its rates are 0.1, 0.325 and 0.55 times the "
        "reference's in the first updates",
    ),
    "own cycled momentum kept, a decay": (
        decaying(SGD, momentum=0.9),
        like(decaying(SGD, 0.05, momentum=0.9), one_cycle),
        "weight_decay=0.05 in place of 0.2",
        {"schedule": one_cycle},
    ),
    "own schedule kept, whose first rate is 0": (
        decaying(AdamW),
        like(decaying(AdamW, 0.05), warm_up),
        "weight_decay=0.05 in place of 0.2",
        {"schedule": warm_up},
    ),
    "own schedule kept, of a rate in a tensor": (
        decaying(AdamW, lr=torch.tensor(0.02)),
        like(decaying(AdamW, 0.05), one_cycle),
        "weight_decay=0.05 in place of 0.2",
        {"schedule": one_cycle},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED)
def test_numbers_of_a_recipe_are_fitted_to_the_ports_updates(name):
    optimizer, own, said, *options = FITTED[name]
    result = linear_check(
        optimizer=optimizer, port_optimizer=own, steps=3, **(options[0] if options else {})
    )
    (cause,) = result.explain().causes
    assert cause == said


class Ignored(torch.nn.Linear):
    """A linear layer with a parameter that its port lacks; the loss hardly depends on it."""

    def __init__(self):
        super().__init__(IN, OUT)
        self.extra = torch.nn.Parameter(torch.ones(3))

    def forward(self, input):
        return super().forward(input) + 0.0 * self.extra.sum()


@pytest.mark.slow
def test_a_parameter_that_the_table_ignores_is_left_out_of_the_fit():
    reference = Ignored()
    reference.load_state_dict(layers("float32")[0].state_dict(), strict=False)
    result = linear_check(
        reference=reference,
        layout=transfer.LINEAR + transfer.Layout(ignored("extra", "the port lacks it")),
        optimizer=decaying(AdamW),
        port_optimizer=optax.adamw(0.02, weight_decay=0.05),
        steps=3,
    )
    (cause,) = result.explain().causes
    assert cause == "weight_decay=0.05 in place of 0.2"


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


@pytest.mark.slow
def test_of_a_right_training_nothing_differs():
    explanation = judge_case("SGD").explain()
    assert (explanation.verdict, explanation.regions, explanation.causes) == ("PASS", (), ())


@pytest.mark.slow
def test_an_optimizer_without_weight_decay_is_explained():
    """optax's rprop makes each update one step late."""
    late = linear_check(
        optimizer=lambda m: Rprop(m.parameters(), 0.02), port_optimizer=optax.rprop(0.02)
    )
    explanation = late.explain()
    assert explanation.first_wrong.transform == "update 1", str(late)
    assert explanation.causes == ()
