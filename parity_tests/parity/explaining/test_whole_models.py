"""Whole models of transformers' with one mistake each: the first wrong tensor, and its cause.

With --long alone: conftest.py has its name.
"""

from functools import cache

import pytest
from parity.attack.test_wrong_models import MISTAKES, of_family

from helpers.attack.port import Port
from jax_attn import parity

# mistake -> how the cause's name begins, or several that give the same numbers; None where no known
# cause is what the port does.
CAUSES = {
    "zeros in empty rows": "mask (empty row: zeros)",
    "NaN in empty rows": "mask (empty row: NaN)",
    "mask by -10": "mask (added)",
    "mask after the softmax, not summed to 1": "mask (after the softmax)",
    "padding ignored": "mask",
    "mask of the first row": "mask (first row of the batch)",
    "not causal in the last layer": "causal (ignored)",
    "window 1 wider": "window (one key longer)",
    "window 1 narrower": "window",
    "windows in the other layers": "window (ignored)",
    "positions ignored": "position (counted from zero)",
    "positions of the first row": "position (of the first row)",
    "positions from the mask": None,
    "queries a position too far": "position (one too far)",
    "keys not rotated": ("rotary (left out)", "position (all zero)"),
    "interleaved rotary": "rotary (interleaved)",
    "heads tiled": "head order (tiled)",
    "gate and up swapped": "packed order (exchanged)",
    "keys for values": "packed order",
    "query and key swapped": ("packed order", "transposed"),
    "epsilon 100 times larger": "epsilon",
    "norm without its 1": "norm",
    "residual from the norm": "residual",
    "parallel residual": "residual (left out)",
    "softcap 5% larger": "scale",
    "scores scaled": "scale",
    "gelu for silu": "activation (gelu by tanh)",
    "gelu by tanh": "activation (gelu by tanh)",
    "gelu by erf": "activation (gelu)",
    "token types ignored": "position (all zero)",
    "distance the other way round": "transposed",
    "attention across the batch": None,
    "pre-norm": None,
    "one expert a token": None,
    "experts 3 and 4 swapped": None,
    "distances one too large": None,
    "bias after the softmax": None,
    "maximal distance doubled": None,
    "a clamp left out": None,
    "bias in the first layer alone": "bias (left out)",
}
# (family, mistake) -> what is found instead: rounding behind the scaled embedding counts as a wrong
# tensor there.
KNOWN = {("gemma2", "epsilon 100 times larger"): "precision"}


@cache
def explained(family: str, wrong: str) -> parity.Explanation:
    reference, call, forward, inputs = of_family(family)
    return parity.explain(
        reference,
        Port(reference, forward, wrong),
        inputs,
        reference_call=call,
        gradients=False,
        transforms=("jit",),
    )


@pytest.mark.parametrize("family", MISTAKES)
def test_nothing_differs_in_a_right_model(family):
    assert explained(family, "").regions == ()


@pytest.mark.parametrize(
    ("family", "wrong"), [(family, wrong) for family in MISTAKES for wrong in MISTAKES[family]]
)
def test_the_cause_of_each_mistake(family, wrong):
    first = explained(family, wrong).regions[0]
    confirmed = [cause.name for cause in first.causes if cause.confirmed]
    cause = KNOWN.get((family, wrong), CAUSES[wrong])
    if cause is None:
        assert confirmed == []
    else:
        assert confirmed[0].startswith(cause)
