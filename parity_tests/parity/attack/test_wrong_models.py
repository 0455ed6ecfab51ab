"""Whole models of transformers', right and with one mistake each, on suggested inputs.

The right ones pass without an unusual note; every mistake fails, and its cause is found. They run
with --long alone: conftest.py.
"""

import pytest

from helpers.attack import decoders, encoders
from helpers.parity.findings import kinds

MODELS = decoders.MODELS | encoders.MODELS
# mistake -> how the name of its cause begins, or several that give the same numbers; None where no
# known cause is what the port does.
OF_ALL = {
    "zeros in empty rows": "mask (empty row: zeros)",
    "NaN in empty rows": "mask (empty row: NaN)",
    "mask by -10": "mask (added)",
    "mask after the softmax, not summed to 1": "mask (after the softmax)",
    "padding ignored": "mask",
}
OF_DECODERS = OF_ALL | {
    "positions ignored": "position (counted from zero)",
    "positions of the first row": "position (of the first row)",
    "positions from the mask": None,
    "epsilon 100 times larger": "epsilon",
    "residual from the norm": "residual",
    "heads tiled": "head order (tiled)",
    "mask of the first row": "mask (first row of the batch)",
    "not causal in the last layer": "causal (ignored)",
    "keys not rotated": ("rotary (left out)", "position (all zero)"),
    "queries a position too far": "position (one too far)",
    "interleaved rotary": "rotary (interleaved)",
}
OF_WINDOWS = {"window 1 wider": "window (one key longer)", "window 1 narrower": "window"}
OF_ENCODERS = OF_ALL | {
    "keys for values": "packed order",
    "query and key swapped": ("packed order", "transposed"),
    "attention across the batch": None,
}
MISTAKES = {
    "llama": OF_DECODERS
    | {
        "gate and up swapped": "packed order (exchanged)",
        "gelu for silu": "activation (gelu by tanh)",
        "parallel residual": "residual (left out)",
    },
    "mistral": OF_DECODERS | OF_WINDOWS,
    "gemma2": OF_DECODERS
    | OF_WINDOWS
    | {
        # Rounding behind the scaled embedding counts as a wrong tensor there.
        "epsilon 100 times larger": "precision",
        "windows in the other layers": "window (ignored)",
        "softcap 5% larger": "scale",
        "norm without its 1": "norm",
        "gelu by erf": "activation (gelu)",
    },
    "mixtral": OF_DECODERS | {"one expert a token": None, "experts 3 and 4 swapped": None},
    "bert": OF_ENCODERS
    | {
        "token types ignored": "position (all zero)",
        "positions ignored": "position (counted from zero)",
        "gelu by tanh": "activation (gelu by tanh)",
        "pre-norm": None,
    },
    "mpnet": OF_ENCODERS
    | {
        "distance the other way round": "transposed",
        "distances one too large": None,
        "bias after the softmax": None,
    },
    "t5": OF_ENCODERS
    | {
        "distance the other way round": "transposed",
        "maximal distance doubled": None,
        "a clamp left out": None,
        "scores scaled": "scale",
        "bias in the first layer alone": "bias (left out)",
    },
}
# What the length of the suggested inputs does not reach.
KNOWN = {"mpnet": ["idle-branch"]}


@pytest.mark.parametrize("family", MISTAKES)
def test_a_right_model_passes(family):
    result = MODELS[family].explain(gradients=True).result
    assert result.verdict == "PASS", result.reasons
    assert kinds(result, "note") == KNOWN.get(family, []), result.notes


@pytest.mark.parametrize(
    ("family", "wrong"), [(family, wrong) for family in MISTAKES for wrong in MISTAKES[family]]
)
def test_a_wrong_model_fails_by_its_cause(family, wrong):
    explanation, cause = MODELS[family].explain(wrong), MISTAKES[family][wrong]
    assert explanation.verdict == "FAIL"
    confirmed = [cause.name for cause in explanation.regions[0].causes if cause.confirmed]
    assert confirmed == [] if cause is None else confirmed[0].startswith(cause), confirmed
