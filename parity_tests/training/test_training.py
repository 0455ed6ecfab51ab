"""check_training passes ports that train as torch does, and fails ports that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.optim import SGD, AdamW

from helpers.parity.findings import kinds, sentences
from helpers.parity.training_checks import adamw, linear_check, sgd
from jax_attn import GroupedQueryAttention, parity, transfer
from jax_attn.parity.judge.compare import Verdict
from jax_attn.selfcheck.training_bugs.cases import TRAINING_CASES, batches, judge_case, layers
from torch_ref import DESIGNS

N, K, H, D, B, T = 6, 3, 5, 13, 3, 7


# Each a kind of case that another row has, too.
REPEATED = (
    "SGD",
    "SGD, bias left out",
    "Adam",
    "Adam, decay",
    "AdamW",
    "AdamW in bfloat16",
    "NAdam",
    "RMSprop",
    "Adagrad",
    "cosine",
)


def pytest_generate_tests(metafunc):
    """A case of every kind; all with --long."""
    if "case" in metafunc.fixturenames:
        left_out = () if metafunc.config.getoption("--long") else REPEATED
        metafunc.parametrize("case", [name for name in TRAINING_CASES if name not in left_out])


@pytest.mark.slow
def test_a_right_port_trains_as_torch_does(case):
    result = judge_case(case)
    assert result.verdict is Verdict.PASS, str(result)


def attention() -> dict:
    """Arguments of a check of grouped-query attention."""
    torch.manual_seed(0)
    reference = DESIGNS["gqa"](D, N, K, head_dim=H)
    port = GroupedQueryAttention(D, N, K, head_dim=H, rngs=nnx.Rngs(0))
    transfer.load(port, reference.state_dict(), transfer.LAYOUTS["gqa"])
    rng = np.random.default_rng(0)
    data = [
        {name: rng.standard_normal((B, T, D)).astype(np.float32) for name in ("query", "target")}
        for _ in range(2)
    ]
    options = {"layout": transfer.LAYOUTS["gqa"], "optimizer": adamw, "loss": "mse", "steps": 5}
    return {"reference": reference, "port": port, "batches": data} | options


@pytest.fixture(scope="module")
def attended() -> tuple[dict, parity.Result, list[bytes]]:
    arguments = attention()
    before = bits(arguments)
    return arguments, parity.check_training(**arguments), before


def bits(arguments: dict) -> list[bytes]:
    ours = transfer.flatten(arguments["port"]).values()
    theirs = arguments["reference"].state_dict().values()
    return [np.asarray(a).tobytes() for a in (*ours, *theirs)]


@pytest.mark.slow
def test_attention_trains_alike_though_adam_makes_steps_of_a_key_biass_rounding(attended):
    _, result, _ = attended
    assert result.verdict is Verdict.PASS, str(result)
    assert any("k_proj.bias" in note for note in sentences(result, "drift"))


@pytest.mark.slow
def test_the_modules_stay_as_they_were(attended):
    arguments, _, before = attended
    assert bits(arguments) == before


def test_gradients_updates_state_losses_and_parameters_are_each_judge_case(attended):
    _, result, _ = attended
    labels = {(t.transform, t.label) for t in result.tensors}
    assert {
        ("first batch", "grad q_proj.kernel"),
        ("update 1", "update of q_proj.kernel"),
        ("update 3", "update of q_proj.kernel"),
        ("update 3", "exp_avg of q_proj.kernel"),
        ("update 3", "exp_avg_sq of q_proj.kernel"),
        ("losses 1-2", "loss"),
        ("losses 4-5", "loss"),
        ("step 2", "moved q_proj.kernel"),
        ("step 5", "moved q_proj.kernel"),
    } <= labels


@pytest.mark.slow
def test_other_weights_fail_by_name(attended):
    arguments, _, _ = attended
    other = nnx.clone(arguments["port"])
    other.v_proj.bias[...] = other.v_proj.bias[...] + 1e-6
    result = parity.check_training(**(arguments | {"port": other, "optimizer": sgd, "steps": 1}))
    assert result.verdict is Verdict.FAIL
    assert any("v_proj.bias" in failure for failure in sentences(result, "weights-differ"))


@pytest.mark.slow
def test_a_ports_own_optimizer_is_what_is_judge_case():
    """optax's AdamW at its own defaults: another weight decay."""
    reference, port = layers("float32")
    result = parity.check_training(
        reference,
        port,
        batches(),
        layout=transfer.LINEAR,
        optimizer=lambda m: AdamW(m.parameters(), 0.02, weight_decay=0.2),
        loss="mse",
        port_call=lambda module, input: module(input),
        port_optimizer=optax.adamw(0.02),
        steps=2,
    )
    assert result.verdict is Verdict.FAIL


OWN = {
    "as it is": (optax.adamw(0.02, weight_decay=0.2), Verdict.PASS, ["optimizer-rounding"], ""),
    "a rate 1e-4 too large": (
        optax.adamw(0.02 * 1.0001, weight_decay=0.2),
        Verdict.FAIL,
        [],
        "a learning rate 1.0001 times as large",
    ),
    "another decay": (
        optax.adamw(0.02, weight_decay=1e-4),
        Verdict.FAIL,
        [],
        "weight_decay=0.0001 in place of 0.2",
    ),
    "a decay lost in float32": (
        optax.adamw(0.02, b2=1 - 1e-8, weight_decay=0.2),
        Verdict.FAIL,
        [],
        "",
    ),
    "numbers below float32's": (
        optax.chain(
            optax.scale(1e-30),
            optax.scale(1e-30),
            optax.scale(1e30),
            optax.scale(1e30),
            optax.adamw(0.02, weight_decay=0.2),
        ),
        Verdict.FAIL,
        [],
        "",
    ),
    "moments in bfloat16": (
        optax.adamw(0.02, weight_decay=0.2, mu_dtype="bfloat16"),
        Verdict.FAIL,
        [],
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_rounding_in_optaxs_own_optimizer_is_told_from_what_it_computes(name):
    tx, verdict, notes, cause = OWN[name]
    betas = (0.9, 1 - 1e-8 if "lost" in name else 0.999)
    result = linear_check(
        optimizer=lambda m: AdamW(m.parameters(), 0.02, betas, weight_decay=0.2),
        port_optimizer=tx,
        steps=4,
    )
    assert result.verdict is verdict, str(result)
    assert [kind for kind in kinds(result, "note") if kind == "optimizer-rounding"] == notes
    if notes:
        (said,) = sentences(result, "optimizer-rounding")
        assert all(f"after {n} update" in said for n in ("1", "100", "10,000"))
    if cause:
        assert cause in result.explain().sentence


def smoothed(gradients, state, params=None):
    """Keeps a number of its own dtype beside the gradients."""
    return gradients, 0.9 * state + 0.1 * optax.global_norm(gradients)


@pytest.mark.slow
def test_an_optimizer_that_computes_only_in_its_own_dtype_is_judged_by_that():
    beside = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.float32), smoothed)
    result = linear_check(
        optimizer=lambda m: SGD(m.parameters(), 0.1),
        port_optimizer=optax.chain(beside, optax.sgd(0.2)),
        steps=2,
    )
    assert result.verdict is Verdict.FAIL


@pytest.mark.slow
def test_an_optimizer_that_keeps_no_state_fails_by_name():
    result = judge_case("SGD, momentum", optax.sgd(0.1))
    assert any("momentum_buffer of kernel" in x for x in sentences(result, "moment-missing"))


def dropping(times: int):
    """What is kept, over the rate at which it is, so many times over."""
    return lambda module, input, keep: module(input) * keep / 0.75**times


@pytest.mark.slow
@pytest.mark.parametrize(("times", "expected"), [(1, Verdict.PASS), (2, Verdict.FAIL)])
def test_dropout_handed_in_is_divided_by_its_rate_once(times, expected):
    rng = np.random.default_rng(6)
    masked = [batch | {"keep": rng.random((7, 3)) < 0.75} for batch in batches()]
    calls = {"reference_call": dropping(1), "port_call": dropping(times)}
    result = linear_check(batches=masked, **calls)
    assert result.verdict is expected, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", ["sum", "mean"])
def test_gradients_add_up_in_float64_where_jax_holds_it(accumulated):
    with jax.enable_x64(True):
        result = linear_check(**float64_pair(), accumulate=3, accumulated=accumulated)
    assert result.verdict is Verdict.PASS, str(result)


def test_updates_lost_in_rounding_are_inconclusive():
    """A rate so small that float32 weights hardly see it: nothing could fail."""
    result = linear_check(optimizer=lambda m: SGD(m.parameters(), 1e-7))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "no-power" in kinds(result, "doubt")


def float64_pair() -> dict:
    torch.manual_seed(0)
    reference = torch.nn.Linear(5, 3).double()
    port = nnx.Linear(5, 3, param_dtype=jax.numpy.float64, rngs=nnx.Rngs(0))
    transfer.load(port, reference.state_dict(), transfer.LINEAR)
    return {"reference": reference, "port": port, "dtype": "float64"}


@pytest.mark.slow
def test_float64_where_jax_holds_it():
    with jax.enable_x64(True):
        result = linear_check(**float64_pair(), optimizer=adamw)
    assert result.verdict is Verdict.PASS, str(result)


class Torchs(torch.nn.Sequential):
    """Two layers of which the last starts at zero, as an adapter's: no gradient reaches the first
    until it has moved."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(5, 4, bias=False), torch.nn.Linear(4, 3, bias=False))
        torch.nn.init.zeros_(self[1].weight)


class Ports(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(5, 4, use_bias=False, rngs=rngs)
        self.last = nnx.Linear(4, 3, use_bias=False, rngs=rngs)

    def __call__(self, input):
        return self.last(self.first(input))


ADAPTED = transfer.Layout(
    transfer.row("0.weight", "first.kernel", transfer.linear),
    transfer.row("1.weight", "last.kernel", transfer.linear),
)


def first_stopped(lr: float) -> optax.GradientTransformation:
    """SGD that never moves the first layer."""
    stop = optax.stateless(lambda u, _: u | {"first.kernel": 0 * u["first.kernel"]})
    return optax.chain(optax.sgd(lr), stop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "own", "expected"),
    [
        (0.1, optax.sgd, Verdict.PASS),
        (0.1, first_stopped, Verdict.FAIL),
        (1e-4, first_stopped, Verdict.INCONCLUSIVE),
    ],
)
def test_a_layer_that_waits_for_its_first_gradient_is_compared(lr, own, expected):
    reference, port = Torchs(), Ports(nnx.Rngs(0))
    transfer.load(port, reference.state_dict(), ADAPTED)
    result = linear_check(
        reference=reference,
        port=port,
        layout=ADAPTED,
        optimizer=lambda m: SGD(m.parameters(), lr),
        port_call=None,
        port_optimizer=own(lr),
        steps=4,
    )
    assert result.verdict is expected, str(result)
