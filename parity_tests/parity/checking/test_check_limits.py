"""`parity.check` says what it did not compare or judge, and refuses what it cannot check."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.block_pair import pair
from helpers.parity.findings import kinds, sentences
from helpers.parity.functions import PortFunction, TorchFunction
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking.arguments import input_doubts
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.budget import bridge
from jax_attn.parity.judge.compare import rms
from jax_attn.parity.run.inputs_and_runs import Inputs, RaisedError
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import LAYER_NORM, LINEAR, Layout, linear, load, row


@pytest.mark.slow
def test_without_a_layout_the_result_says_what_was_not_compared(x):
    result = check(*pair(), (x,), transforms=("jit",))
    assert result.verdict is Verdict.PASS
    assert "weights-not-compared" in kinds(result, "note")
    assert {t.label for t in result.tensors} == {"output", "grad input 0"}


def test_inputs_without_power_are_inconclusive(x):
    """Two numbers that cancel: the output is rounding and nothing else."""
    pair = (side(lambda x: (x + 1e7) - 1e7) for side in (TorchFunction, PortFunction))
    result = check(*pair, (x,), gradients=False, transforms=("eager",))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert kinds(result, "failure", "doubt") == ["no-power"]


def test_a_check_of_zeros_alone_is_inconclusive():
    reference, port = (
        torch.nn.Linear(5, 3, bias=False),
        nnx.Linear(5, 3, use_bias=False, rngs=nnx.Rngs(0)),
    )
    options = {"gradients": False, "transforms": ("eager",)}
    result = check(reference, port, (np.zeros((2, 5)),), **options)  # with other weights
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "all-zero" in kinds(result, "doubt")
    result = check(reference, port, (np.zeros((2, 5)),), transforms=("eager",))
    assert result.verdict is Verdict.FAIL


@pytest.mark.slow
def test_a_table_that_does_not_fit_fails_with_its_problems(x):
    short = Layout(LAYER_NORM.under("norm", "norm"), LINEAR.under("head", "head"))
    result = check(*pair(), (x,), layout=short, transforms=("jit",))
    assert result.verdict is Verdict.FAIL
    assert "attention.q_proj.kernel" in "\n".join(sentences(result, "weights-differ"))
    assert "gradients-not-paired" in kinds(result, "note")


class Shifted(torch.nn.Module):
    """A softmax of scores that a number a head is added to: the same, and its gradient is 0.

    Of several heads, as the rounding of one sum may be 0 by chance.
    """

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(5, 1, 1))

    def forward(self, scores):
        return torch.softmax(scores + self.shift, dim=-1)


@pytest.mark.slow
def test_a_zero_that_is_a_sum_of_many_is_a_zero_in_bfloat16_too(monkeypatch):
    """Of them bfloat16's roundings cancel, float64's of a sum do not: they are asked for.

    Here of a sum kept in float32, as devices other than the CPU keep it.
    """
    finer = "jax_attn.parity.run.modes.perturbed_mode.bridge_of"
    monkeypatch.setattr(finer, lambda name, n, args, precision, coarse: bridge(n, precision))
    scores = np.random.default_rng(3).standard_normal((5, 3, 40009)).astype(jnp.bfloat16)
    reference = Reference(Shifted().to(torch.bfloat16), None, Inputs((scores,), {}))
    prepared = Prepared(reference, "bfloat16", runs=12)
    kind = "gradient of parameter"
    rounding = rms(prepared.exact.kinds[kind]["shift"])
    alone = reference.spread("bfloat16", prepared.cotangents, 12)[kind]["shift"].zero
    assert alone < rounding <= prepared.budgets[kind]["shift"].zero


BAD = {
    "a number that the dtype does not hold": (
        lambda r, p, x: check(*pair("float16"), (1e6 * x,), dtype="float16"),
        TypeError,
        r"inputs\[0\]: expected numbers that float16 holds",
    ),
    "a reference that is no module": (
        lambda r, p, x: check(p, p, (x,)),
        TypeError,
        "reference: expected a torch.nn.Module, got FlaxBlock, which is a port",
    ),
    "a port that is no module": (
        lambda r, p, x: check(r, r, (x,)),
        TypeError,
        "port: expected an nnx.Module, .* got TorchBlock, a torch.nn.Module",
    ),
    "a layout that is none": (
        lambda r, p, x: check(r, p, (x,), layout={}),
        TypeError,
        "layout: expected a Layout, got dict",
    ),
    "a keyword that is no string": (
        lambda r, p, x: check(r, p, {0: x}),
        TypeError,
        "inputs: expected strings as keywords, got 0",
    ),
    "complex inputs": (
        lambda r, p, x: check(r, p, (x.astype(np.complex64),)),
        TypeError,
        r"inputs\[0\]: expected real numbers, got complex64",
    ),
    "complex outputs": (
        lambda r, p, x: check(r, p, (x,), reference_call=lambda m, x: torch.fft.fft(m(x))),
        ValueError,
        r"reference: expected real outputs, got complex ones, \['output'\]",
    ),
    "a list of arrays": (
        lambda r, p, x: check(r, p, [x]),
        TypeError,
        r"inputs\[0\]: expected a tuple of positional or a dict",
    ),
    "an input that is a tensor": (
        lambda r, p, x: check(r, p, (torch.from_numpy(x),)),
        TypeError,
        r"inputs\[0\]: expected a NumPy array",
    ),
    "an unknown dtype": (
        lambda r, p, x: check(r, p, (x,), dtype="float8"),
        ValueError,
        "dtype: expected one of float32",
    ),
    "a dtype that is no name": (
        lambda r, p, x: check(r, p, (x,), dtype=np.dtype("float32")),
        ValueError,
        r"dtype: expected one of float32.* got dtype\('float32'\)",
    ),
    "an unknown transform, and no x64": (
        lambda r, p, x: check(r, p, (x,), dtype="float64", transforms=("xla",)),
        ValueError,
        r"(?s)(?=.*transforms: expected .*xla)(?=.*float64 needs JAX's x64 mode)",
    ),
    "transforms as a word": (
        lambda r, p, x: check(r, p, (x,), transforms="jit"),
        ValueError,
        "transforms: expected a tuple",
    ),
    "a reference in another dtype": (
        lambda r, p, x: check(r, p, (x,), dtype="bfloat16"),
        ValueError,
        "reference parameter 'norm.weight': expected bfloat16, got torch.float32",
    ),
    "a reference in training mode, with dropout": (
        lambda r, p, x: check(pair(dropout=0.5)[0].train(), p, (x,)),
        ValueError,
        r"reference: expected the same outputs each time.*\.eval\(\)",
    ),
    "a port in another dtype": (
        lambda r, p, x: check(r, pair("bfloat16")[1], (x,), transforms=("jit",)),
        TypeError,
        "port: expected outputs of dtype float32, got",
    ),
    "outputs without names": (
        lambda r, p, x: check(r, p, (x,), reference_call=lambda m, x: {"y": m(x), "all": (x,)}),
        TypeError,
        r"reference: expected an array or a dict of named arrays, got dict with 'all' \(tuple\); ",
    ),
    "a tuple of outputs": (
        lambda r, p, x: check(r, p, (x,), reference_call=lambda m, x: (m(x), m(x))),
        TypeError,
        "reference_call=lambda",
    ),
    "flags that are words, and no functions": (
        lambda r, p, x: check(
            r, p, (x,), gradients="no", strict="yes", seed="a", reference_call=3, port_call=x
        ),
        TypeError,
        r"(?s)gradients: expected True or False, got 'no'.reference_call: expected a function .* 3."
        r"seed: expected an integer of 0 or more, got 'a'.strict: expected .*'yes'.port_call: ",
    ),
    "a seed below zero": (
        lambda r, p, x: check(r, p, (x,), seed=-1),
        ValueError,
        "seed: expected an integer of 0 or more, got -1",
    ),
    "inputs that the reference does not take": (
        lambda r, p, x: check(r, p, {"y": x}),
        RaisedError,
        r"reference: expected it to run on inputs y float32\[.*got TypeError: .*argument 'y'",
    ),
    "inputs that the port does not take": (
        lambda r, p, x: check(r, p, (x,), port_call=lambda m, x: 1 // 0, transforms=("jit",)),
        RaisedError,
        r"port: expected it to run on inputs 0 float32\[.*got ZeroDivisionError: .*were traced",
    ),
    "a branch on numbers, which cannot be traced": (
        lambda r, p, x: check(
            r, p, (x,), port_call=lambda m, x: m(x if x.max() > 1 else -x), transforms=("jit",)
        ),
        RaisedError,
        r"TracerBoolConversionError",
    ),
    "integers that JAX narrows": (
        lambda r, p, x: check(r, p, {"x": x, "ignored": np.full((2, 7), 2**40)}),
        TypeError,
        r"inputs\['ignored'\]: expected integers that fit int32, .* got 1099511627776 to 1099511",
    ),
    "outputs without a gradient": (
        lambda r, p, x: check(
            r, p, (x,), reference_call=lambda m, x: m(x).detach(), transforms=("jit",)
        ),
        ValueError,
        r"outputs with a gradient.*requires_grad is False.*torch.no_grad\(\).*pass gradients=False",
    ),
    "ids beyond a table": (
        lambda r, p, x: check(torch.nn.Embedding(5, 3), p, (np.array([[2, 5]]),)),
        RaisedError,
        r"reference: .* on inputs 0 int64\[1, 2\], got IndexError: .*; input '0' holds 2 to 5, but "
        r"the embedding '' has rows 0 to 4",
    ),
    "outputs that are integers": (
        lambda r, p, x: check(r, p, (x,), reference_call=lambda m, x: m(x).argmax(-1)),
        ValueError,
        "reference: expected floating-point outputs, got {'output': 'int64'}: .*return the scores",
    ),
    "an empty input": (
        lambda r, p, x: check(r, p, (x[:0],)),
        ValueError,
        r"outputs that hold numbers, got .*: inputs 0 of shape \(0, .* hold no numbers",
    ),
    "outputs named otherwise": (
        lambda r, p, x: check(r, p, (x,), port_call=lambda m, x: {"y": m(x)}, transforms=("jit",)),
        ValueError,
        r"output: the reference has \['output'\], the port \['y'\]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", BAD)
def test_what_cannot_be_checked_is_refused_by_name(row, x):
    call, error, message = BAD[row]
    with pytest.raises(error, match=message):
        call(*pair(), x)


@pytest.mark.parametrize("name", ["inputs", "call", "side"])
def test_a_keyword_may_have_any_name(name):
    reference = TorchFunction(lambda **given: torch.tanh(given[name]))
    port = PortFunction(lambda **given: jnp.tanh(given[name]))
    x = np.random.default_rng(0).standard_normal((3, 5))
    check(reference, port, {name: x}, transforms=("jit",)).raise_for_status()


# the input's third element, the weight's -> the doubt, "" for none.
NOT_FINITE = {
    "finite": (0.5, 0.5, ""),
    "NaN in an input": (np.nan, 0.5, "input '0' holds 1 NaN of 6 numbers: "),
    "infinity in an input": (np.inf, 0.5, "input '0' holds 1 infinite of 6 numbers: "),
    "NaN in a weight": (0.5, np.nan, "parameter 'weight' holds 1 NaN of 9 numbers: "),
}


@pytest.mark.parametrize("row", NOT_FINITE)
def test_numbers_that_are_not_finite_are_named(row):
    """tanh makes finite numbers of infinite ones, whatever the weights are."""
    of_input, of_weight, doubt = NOT_FINITE[row]
    reference, port = torch.nn.Linear(3, 3), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    reference.weight.data[0, 2] = of_weight
    load(port, reference.state_dict(), LINEAR)
    calls = {"reference_call": lambda m, x: m(x).tanh(), "port_call": lambda m, x: jnp.tanh(m(x))}
    x = np.random.default_rng(0).standard_normal((2, 3))
    x[0, 2] = of_input
    result = check(reference, port, (x,), layout=LINEAR, transforms=("eager",), **calls)
    assert result.verdict is (Verdict.INCONCLUSIVE if doubt else Verdict.PASS), str(result)
    told = sentences(result, "input-not-finite")
    assert [sentence.startswith(doubt) for sentence in told] == [True] * bool(doubt)


@pytest.mark.slow
def test_outputs_without_a_gradient_on_either_side_are_checked():
    """As rotary's tables, of which the input tells the dtype only; not so wrong outputs."""

    def checked(number):
        return check(
            torch.nn.Linear(3, 3),
            nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
            (np.ones((2, 3)), np.arange(2)),
            reference_call=lambda m, x, n: n.to(x.dtype).cos(),
            port_call=lambda m, x, n: number * jnp.cos(n.astype(x.dtype)) + 0 * x.sum(),
            transforms=("jit",),
        )

    assert [checked(n).verdict for n in (1, 1.001)] == ["PASS", "FAIL"]


def test_a_mask_of_infinities_is_none_of_them(x):
    """What is added to hide keys."""
    mask = np.triu(np.full((x.shape[1],) * 2, -np.inf), 1)
    reference = Reference(torch.nn.Module(), None, Inputs((), {"bias": mask}))
    assert input_doubts(Prepared(reference, "float32")) == ()


def test_a_row_of_an_unknown_key_names_the_nearest():
    reference, port = torch.nn.Linear(3, 3), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    table = Layout(row("weigth", "kernel", linear), row("bias", "bias"))
    result = check(reference, port, (np.ones((2, 3)),), layout=table, transforms=("eager",))
    assert "the table gives 'weigth', which the reference lacks; nearest: 'weight'" in str(result)
