"""Whole models of transformers', right and with one mistake each, on suggested inputs.

The right ones pass without a note and every mistake fails. With --long alone: conftest.py.
"""

from functools import cache

import pytest

from helpers.attack import decoders, encoders
from helpers.attack.port import Port, table
from jax_attn import parity
from jax_attn.parity.judge.result import StandingNote

OF_ALL = (
    "zeros in empty rows",
    "NaN in empty rows",
    "mask by -10",
    "mask after the softmax, not summed to 1",
    "padding ignored",
)
OF_DECODERS = (
    *OF_ALL,
    "positions ignored",
    "positions of the first row",
    "positions from the mask",
    "epsilon 100 times larger",
    "residual from the norm",
    "heads tiled",
    "mask of the first row",
    "not causal in the last layer",
    "keys not rotated",
    "queries a position too far",
    "interleaved rotary",
)
OF_WINDOWS = ("windows in the other layers", "window 1 wider", "window 1 narrower")
OF_ENCODERS = (*OF_ALL, "keys for values", "query and key swapped", "attention across the batch")
OF_BUCKETS = ("distance the other way round", "maximal distance doubled", "a clamp left out")
MISTAKES = {
    "llama": (*OF_DECODERS, "gate and up swapped", "gelu for silu", "parallel residual"),
    "mistral": (*OF_DECODERS, "window 1 wider", "window 1 narrower"),
    "gemma2": (*OF_DECODERS, *OF_WINDOWS, "softcap 5% larger", "norm without its 1", "gelu by erf"),
    "mixtral": (*OF_DECODERS, "one expert a token", "experts 3 and 4 swapped"),
    "bert": (*OF_ENCODERS, "token types ignored", "positions ignored", "gelu by tanh", "pre-norm"),
    "mpnet": (
        *OF_ENCODERS,
        "distance the other way round",
        "distances one too large",
        "bias after the softmax",
    ),
    "t5": (*OF_ENCODERS, *OF_BUCKETS, "scores scaled", "bias in the first layer alone"),
}

# Of the right model on what `suggest_inputs` makes: what its length does not reach.
KNOWN = {"mpnet": ("idle-branch",)}


@cache
def of_family(family: str):
    module = decoders if family in decoders.MODELS else encoders
    reference = module.reference(family)
    forward = decoders.forward_of(family) if module is decoders else encoders.FORWARD[family]
    inputs = parity.suggest_inputs(reference, reference_call=module.call)
    return reference, module.call, forward, inputs


def check(family: str, wrong: str, gradients: bool) -> parity.Result:
    reference, call, forward, inputs = of_family(family)
    return parity.check(
        reference,
        Port(reference, forward, wrong),
        inputs,
        layout=table(reference),
        reference_call=call,
        gradients=gradients,
        transforms=("jit",),
    )


@pytest.mark.parametrize("family", MISTAKES)
def test_a_right_model_passes(family):
    result = check(family, "", gradients=True)
    assert result.verdict == "PASS", result.reasons
    unusual = [note for note in result.notes if not isinstance(note, StandingNote)]
    assert tuple(note.kind for note in unusual) == KNOWN.get(family, ()), unusual


@pytest.mark.parametrize(
    ("family", "wrong"), [(family, wrong) for family in MISTAKES for wrong in MISTAKES[family]]
)
def test_a_wrong_model_fails(family, wrong):
    assert check(family, wrong, gradients=False).verdict == "FAIL"
