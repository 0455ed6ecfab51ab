"""check_training of a run that goes on: from given weights, an optimizer's state and batches."""

import jax.numpy as jnp
import optax
import pytest
import torch
from torch.optim import SGD, AdamW, NAdam, lr_scheduler

from helpers.parity.findings import sentences
from helpers.parity.training_checks import linear_check
from jax_attn import parity, transfer
from jax_attn.parity.judge.compare import Verdict
from jax_attn.selfcheck.training_bugs.cases import layers
from jax_attn.transfer import LINEAR

DONE = 5
NAMES = ["weight", "bias"]


def begun(kind, **options):
    """A function that makes an optimizer which has made some updates already."""

    def make(module):
        optimizer = kind(module.parameters(), **options)
        for update in range(DONE):
            for p in module.parameters():
                p.grad = torch.linspace(-1, 1 + update, p.numel()).view(p.shape).to(p.dtype)
            before = [p.detach().clone() for p in module.parameters()]
            optimizer.step()
            with torch.no_grad():
                for p, own in zip(module.parameters(), before, strict=True):
                    p.copy_(own)
        return optimizer

    return make


def cosine(optimizer):
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: 0.8**t)
    for _ in range(DONE):
        scheduler.step()
    return scheduler


ADAMW = begun(AdamW, lr=0.01, weight_decay=0.1)
MOMENTUM = begun(SGD, lr=0.1, momentum=0.9)


def state(tx, count: int = 0):
    """A new optax state, but for its counts."""
    start = {name: jnp.asarray(a) for name, a in transfer.flatten(layers("float32")[1]).items()}
    new = tx.init(start)
    return optax.tree.set(new, count=jnp.int32(count)) if count else new


def carried(tx):
    """torch's state, carried over to optax."""
    optimizer = ADAMW(layers("float32")[0])
    return transfer.load_optimizer(state(tx), optimizer.state_dict(), LINEAR, NAMES)


LIKE = parity.optax_like(ADAMW(layers("float32")[0]))
RATES = optax.exponential_decay(-0.1, 1, 0.8)
SCHEDULED = optax.chain(optax.trace(0.9), optax.scale_by_schedule(RATES))

PLAIN = optax.sgd(lambda count: 0.1)

GOES_ON = {
    # arguments -> verdict, what the difference of the states names
    "AdamW": ({"optimizer": ADAMW}, None),
    "momentum": ({"optimizer": MOMENTUM}, None),
    "a schedule": ({"optimizer": MOMENTUM, "schedule": cosine}, None),
    "a schedule of optax's": (
        {"optimizer": MOMENTUM, "schedule": cosine, "port_optimizer": SCHEDULED},
        None,
    ),
    "the port's state": (
        {"optimizer": ADAMW, "port_optimizer": LIKE, "port_state": carried(LIKE)},
        None,
    ),
    "the port begins anew": (
        {"optimizer": ADAMW, "port_optimizer": LIKE, "port_state": state(LIKE)},
        "count is 0, and torch has made 5 updates",
    ),
    "torch begins anew": (
        {
            "optimizer": lambda m: AdamW(m.parameters(), 0.01, weight_decay=0.1),
            "port_optimizer": LIKE,
            "port_state": carried(LIKE),
        },
        "count is 5, and torch has made 0 updates",
    ),
    "a count that torch's SGD does not keep": (
        {
            "optimizer": lambda m: SGD(m.parameters(), 0.1),
            "port_optimizer": PLAIN,
            "port_state": state(PLAIN, DONE),
        },
        None,
    ),
    "the count alone": (
        {"optimizer": ADAMW, "port_optimizer": LIKE, "port_state": state(LIKE, DONE)},
        "mu.kernel differs from torch's by up to",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_that_goes_on_is_compared_from_its_state(name):
    changed, unlike = GOES_ON[name]
    result = linear_check(steps=3, **changed)
    told = sentences(result, "optimizer-state-differs")
    if unlike is None:
        assert (result.verdict, told) == (Verdict.PASS, []), str(result)
    else:
        assert result.verdict is Verdict.FAIL
        assert any(unlike in line for line in told)
        assert told[0] in result.explain().sentence


@pytest.mark.slow
def test_a_schedule_that_begins_anew_on_one_side_fails():
    here = MOMENTUM(layers("float32")[0]).state_dict()
    kept = transfer.load_optimizer(state(SCHEDULED), here, LINEAR, NAMES, step=DONE)
    result = linear_check(
        steps=3,
        optimizer=MOMENTUM,
        schedule=cosine,
        port_optimizer=SCHEDULED,
        port_state=optax.tree.set(kept, count=jnp.int32(0)),
    )
    assert result.verdict is Verdict.FAIL
    (told,) = sentences(result, "optimizer-state-differs")
    assert "count is 0, and torch has made 5" in told


REFUSED = {
    "a state that does not go over": ({"optimizer": begun(NAdam, lr=0.01)}, "pass port_state="),
    "a schedule elsewhere": (
        {"optimizer": ADAMW, "schedule": lambda o: lr_scheduler.StepLR(o, 3)},
        "schedule: expected a scheduler that has made the optimizer's 5 steps",
    ),
    "another optimizer's state": (
        {"optimizer": ADAMW, "port_state": state(optax.sgd(0.1, 0.9))},
        "port_state: expected a state of the port's optimizer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_cannot_go_on_is_refused_by_name(name):
    changed, expected = REFUSED[name]
    with pytest.raises(ValueError, match="expected") as error:
        linear_check(steps=3, **changed)
    assert expected in str(error.value)
