"""What moving an optimizer's state refuses of optax's side, either way; nothing is written then."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from helpers.attention.small_attention import numpy_weights
from helpers.transfer.optimizer_runs import LAYOUT, LR, MOMENTUM, D, H, K, N, export, load
from helpers.transfer.optimizer_states import (
    ADAM,
    ADAM_STATE,
    NAMES,
    PARAMS,
    SGD,
    SGD_STATE,
    having,
    keeping,
)
from helpers.transfer.small_model import problems_of
from jax_attn import GroupedQueryAttention

ACCUMULATED = optax.MultiSteps(optax.adam(LR), 3).init(PARAMS)
ACCUMULATED = ACCUMULATED._replace(mini_step=jnp.asarray(2, jnp.int32))
TWO_TRACES = optax.chain(optax.trace(MOMENTUM), optax.trace(MOMENTUM)).init(PARAMS)
INJECTED = optax.inject_hyperparams(optax.sgd)(LR, MOMENTUM)
ABSTRACT = jax.eval_shape(INJECTED.init, PARAMS)
ALL_AVG = [("wrong dtype", f"exp_avg of {key}") for key in NAMES]
BOTH_KEPT = [("unexpected", "exp_avg"), ("unexpected", "exp_avg_sq")]

REFUSED = {  # opt_state, torch's state dict, every (kind, name), what it says
    "a schedule, and no step": (
        optax.sgd(optax.constant_schedule(LR), MOMENTUM).init(PARAMS),
        SGD,
        [("missing", "step")],
        "pass step=",
    ),
    "a narrower first moment in optax": (
        optax.adam(LR, mu_dtype="bfloat16").init(PARAMS),
        ADAM,
        ALL_AVG,
        "without mu_dtype",
    ),
    "amsgrad in optax": (
        optax.amsgrad(LR).init(PARAMS),
        ADAM,
        [("refused", "0.count"), *BOTH_KEPT],
        "the largest of the corrected second moments",
    ),
    "Adam's moments in torch, momentum in optax": (
        SGD_STATE,
        ADAM,
        [*BOTH_KEPT, ("missing", "momentum_buffer")],
        "torch has it for 8 parameters, optax has 0 arrays of mu",
    ),
    "momentum in torch, none in optax": (
        optax.sgd(LR).init(PARAMS),
        SGD,
        [("unexpected", "momentum_buffer")],
        "optax has 0 arrays of trace",
    ),
    "an algorithm that torch lacks": (
        optax.lion(LR).init(PARAMS),
        ADAM,
        [("refused", "0.count"), *BOTH_KEPT],
        "got ScaleByLionState",
    ),
    "a value that torch has none for, without it": (
        ABSTRACT,
        SGD,
        [
            ("unreadable", "hyperparams.learning_rate"),
            ("unreadable", "hyperparams.momentum"),
        ],
        "expected a value",
    ),
    "a count that is no array": (
        optax.tree.set(ADAM_STATE, count=0),
        ADAM,
        [("unreadable", "0.count")],
        "got int",
    ),
    "the same moment twice": (
        TWO_TRACES,
        SGD,
        [("ambiguous", path) for path in sorted(PARAMS)],
        "expected one momentum_buffer, got 2",
    ),
    "gradients accumulated": (
        ACCUMULATED,
        ADAM,
        [("refused", "mini_step")],
        "continue to the next update",
    ),
    "a bare array": ((ADAM_STATE, jnp.ones(3)), ADAM, [("refused", "1")], "got a bare array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_loaded_is_named_in_full(case):
    opt_state, torch_state, expected, says = REFUSED[case]
    found, message = problems_of(lambda: load(opt_state, torch_state, LAYOUT, NAMES))
    assert found == expected
    assert says in message


def test_a_failure_leaves_an_nnx_optimizer_as_it_was():
    module = GroupedQueryAttention(D, N, K, head_dim=H, **numpy_weights())
    training = nnx.Optimizer(module, optax.adam(LR), wrt=nnx.Param)

    def bits():
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(training))]

    before = bits()
    problems_of(lambda: load(training, keeping({"exp_avg_sq": None}, of=7), LAYOUT, NAMES))
    assert bits() == before
    load(training, ADAM, LAYOUT, NAMES)
    assert bits() != before


def counting(count):
    adam, *rest = ADAM_STATE
    return (adam._replace(count=jnp.asarray(count, jnp.int32)), *rest)


def is_kernel(params):
    return {path: path.endswith("kernel") for path in params}


KERNELS_ALONE = optax.masked(optax.adam(LR), is_kernel).init(PARAMS)
TWO_ADAMS = optax.partition({True: optax.adam(LR), False: optax.adam(LR)}, is_kernel).init(PARAMS)
TWO_ADAMS.inner_states[False] = optax.tree.set(TWO_ADAMS.inner_states[False], count=np.int32(1))

NOT_EXPORTED = {  # opt_state, torch's state dict, every (kind, name), what it says
    "Adam's moments, momentum in torch": (
        ADAM_STATE,
        SGD,
        [("missing", "exp_avg"), ("missing", "exp_avg_sq"), ("unexpected", "momentum_buffer")],
        "torch has it for 8 parameters, optax has 0 arrays of trace",
    ),
    "moments of some parameters": (
        KERNELS_ALONE,
        ADAM,
        [
            ("missing", f"{moment} of {key}")
            for moment in ("exp_avg", "exp_avg_sq")
            for key in NAMES
            if key.endswith("bias")
        ],
        "the optax state has no mu for it",
    ),
    "moments of another parameter": (
        optax.sgd(LR, MOMENTUM).init(PARAMS | {"rotary": jnp.ones(2)}),
        SGD,
        [("unexpected", "momentum_buffer of rotary")],
        "no row reads it",
    ),
    "moments that torch has no parameter for": (
        SGD_STATE,
        having(SGD, params=[*range(7)], param_names=NAMES[:-1]),
        [("unexpected", f"momentum_buffer of {NAMES[-1]}")],
        "torch keeps no such moment for it",
    ),
    "counts that differ": (
        TWO_ADAMS,
        ADAM,
        [("ambiguous", "step")],
        "got 1 (inner_states.False.inner_state.0.count), 0 (inner_states.True",
    ),
    "a count that float32 does not hold": (
        counting(2**24 + 1),
        ADAM,
        [("refused", "0.count")],
        "got 16777217",
    ),
    "gradients accumulated": (ACCUMULATED, ADAM, [("refused", "mini_step")], "got 2 mini-steps"),
    "shapes without values": (
        jax.eval_shape(lambda: SGD_STATE),
        SGD,
        [("unreadable", f"0.trace.{path}") for path in sorted(PARAMS)],
        "ShapeDtypeStruct",
    ),
    "dampening": (
        SGD_STATE,
        having(SGD, dampening=0.1),
        [("refused", "param_groups[0].dampening")],
        "adds each gradient whole",
    ),
}


@pytest.mark.parametrize("case", NOT_EXPORTED)
def test_what_cannot_be_exported_is_named_in_full(case):
    opt_state, torch_state, expected, says = NOT_EXPORTED[case]
    names = None if "param_names" in torch_state["param_groups"][0] else NAMES
    found, message = problems_of(lambda: export(opt_state, torch_state, LAYOUT, names))
    assert found == expected
    assert says in message
