"""`check(parameters=...)` compares, and keeps, the gradients of the parameters that it names."""

import numpy as np
import pytest

from helpers.parity.block_pair import LAYOUT, pair
from helpers.parity.findings import sentences
from jax_attn.parity import Verdict, check
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

# patterns -> parameters that they name, of nine.
CHOSEN = {
    "norm.*": {"norm.weight", "norm.bias"},
    "*.in_proj_bias": {"attention.in_proj_bias"},
    ("head.weight", "norm.b*"): {"head.weight", "norm.bias"},
}


@pytest.fixture(scope="module")
def both():
    return pair()


def gradients(result):
    return {t.name for t in result.tensors if t.kind == "gradient of parameter"}


@pytest.mark.slow
@pytest.mark.parametrize("patterns", CHOSEN, ids=str)
def test_only_the_gradients_that_are_named_are_compared_and_a_note_says_so(patterns, x, both):
    reference, port = both
    result = check(reference, port, (x,), layout=LAYOUT, transforms=("jit",), parameters=patterns)
    assert result.verdict is Verdict.PASS
    assert gradients(result) == CHOSEN[patterns]
    total = len(dict(reference.named_parameters()))
    (note,) = sentences(result, "parameters-selected")
    assert f"the gradients of {len(CHOSEN[patterns])} of {total} parameters were compared" in note


@pytest.mark.slow
def test_a_wrong_weight_fails_whichever_gradients_are_named(x):
    reference, port = pair()
    port.head.kernel[...] = 1.5 * port.head.kernel[...]
    result = check(reference, port, (x,), layout=LAYOUT, transforms=("jit",), parameters="norm.*")
    assert result.verdict is Verdict.FAIL
    assert "head.weight" in "\n".join(sentences(result, "weights-differ"))


def test_no_other_gradient_is_computed(x):
    reference, _ = pair()
    x = x.astype(np.float32)
    named = Reference(reference, None, Inputs((x,), {}), frozenset({"norm.bias"}))
    cotangents = {"output": np.ones_like(named.outputs("float32")["output"])}
    assert named.run("float32", cotangents).parameter_grads.keys() == {"norm.bias"}
    assert named.spread("float32", cotangents, 2)["gradient of parameter"].keys() == {"norm.bias"}


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        ("nrom.*", ValueError, r"'nrom\.\*', which matches none of .*nearest: .*norm\."),
        (("norm.*", "x"), ValueError, "got 'x'"),
        ((), TypeError, "parameters: expected a pattern"),
        (3, TypeError, "parameters: expected a pattern"),
    ],
    ids=str,
)
def test_patterns_that_name_nothing_are_refused(patterns, error, message, x):
    with pytest.raises(error, match=message):
        check(*pair(), (x,), layout=LAYOUT, parameters=patterns)
