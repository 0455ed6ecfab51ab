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


def refused(opt_state, torch_state, says, *problems):
    """Both states, what their error says, and (kind, name) of each problem."""
    return opt_state, torch_state, [*problems], says


REFUSED = {
    "a schedule, and no step": refused(
        optax.sgd(optax.constant_schedule(LR), MOMENTUM).init(PARAMS),
        SGD,
        "pass step=",
        ("missing", "step"),
    ),
    "a narrower first moment in optax": refused(
        optax.adam(LR, mu_dtype="bfloat16").init(PARAMS), ADAM, "without mu_dtype", *ALL_AVG
    ),
    "amsgrad in optax": refused(
        optax.amsgrad(LR).init(PARAMS),
        ADAM,
        "the largest of the corrected second moments",
        ("refused", "0.count"),
        *BOTH_KEPT,
    ),
    "Adam's moments in torch, momentum in optax": refused(
        SGD_STATE,
        ADAM,
        "torch has it for 8 parameters, optax has 0 arrays of mu",
        *BOTH_KEPT,
        ("missing", "momentum_buffer"),
    ),
    "momentum in torch, none in optax": refused(
        optax.sgd(LR).init(PARAMS),
        SGD,
        "optax has 0 arrays of trace",
        ("unexpected", "momentum_buffer"),
    ),
    "an algorithm that torch lacks": refused(
        optax.lion(LR).init(PARAMS),
        ADAM,
        "got ScaleByLionState",
        ("refused", "0.count"),
        *BOTH_KEPT,
    ),
    "a value that torch has none for, without it": refused(
        ABSTRACT,
        SGD,
        "expected a value",
        ("unreadable", "hyperparams.learning_rate"),
        ("unreadable", "hyperparams.momentum"),
    ),
    "a count that is no array": refused(
        optax.tree.set(ADAM_STATE, count=0), ADAM, "got int", ("unreadable", "0.count")
    ),
    "the same moment twice": refused(
        TWO_TRACES,
        SGD,
        "expected one momentum_buffer, got 2",
        *[("ambiguous", path) for path in sorted(PARAMS)],
    ),
    "gradients accumulated": refused(
        ACCUMULATED, ADAM, "continue to the next update", ("refused", "mini_step")
    ),
    "a bare array": refused((ADAM_STATE, jnp.ones(3)), ADAM, "got a bare array", ("refused", "1")),
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

NOT_EXPORTED = {
    "Adam's moments, momentum in torch": refused(
        ADAM_STATE,
        SGD,
        "torch has it for 8 parameters, optax has 0 arrays of trace",
        ("missing", "exp_avg"),
        ("missing", "exp_avg_sq"),
        ("unexpected", "momentum_buffer"),
    ),
    "moments of some parameters": refused(
        KERNELS_ALONE,
        ADAM,
        "the optax state has no mu for it",
        *[
            ("missing", f"{moment} of {key}")
            for moment in ("exp_avg", "exp_avg_sq")
            for key in NAMES
            if key.endswith("bias")
        ],
    ),
    "moments of another parameter": refused(
        optax.sgd(LR, MOMENTUM).init(PARAMS | {"rotary": jnp.ones(2)}),
        SGD,
        "no row reads it",
        ("unexpected", "momentum_buffer of rotary"),
    ),
    "moments that torch has no parameter for": refused(
        SGD_STATE,
        having(SGD, params=[*range(7)], param_names=NAMES[:-1]),
        "torch keeps no such moment for it",
        ("unexpected", f"momentum_buffer of {NAMES[-1]}"),
    ),
    "counts that differ": refused(
        TWO_ADAMS,
        ADAM,
        "got 1 (inner_states.False.inner_state.0.count), 0 (inner_states.True",
        ("ambiguous", "step"),
    ),
    "a count that float32 does not hold": refused(
        counting(2**24 + 1), ADAM, "got 16777217", ("refused", "0.count")
    ),
    "gradients accumulated": refused(
        ACCUMULATED, ADAM, "got 2 mini-steps", ("refused", "mini_step")
    ),
    "shapes without values": refused(
        jax.eval_shape(lambda: SGD_STATE),
        SGD,
        "ShapeDtypeStruct",
        *[("unreadable", f"0.trace.{path}") for path in sorted(PARAMS)],
    ),
    "dampening": refused(
        SGD_STATE,
        having(SGD, dampening=0.1),
        "adds each gradient whole",
        ("refused", "param_groups[0].dampening"),
    ),
}


@pytest.mark.parametrize("case", NOT_EXPORTED)
def test_what_cannot_be_exported_is_named_in_full(case):
    opt_state, torch_state, expected, says = NOT_EXPORTED[case]
    names = None if "param_names" in torch_state["param_groups"][0] else NAMES
    found, message = problems_of(lambda: export(opt_state, torch_state, LAYOUT, names))
    assert found == expected
    assert says in message
