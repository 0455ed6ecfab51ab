"""`strict`: a note that other arguments could remove is a doubt, and a standing one is none."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from jax_attn.parity import Result, Verdict, check
from jax_attn.parity.judge.finding import StandingNote, findings
from jax_attn.transfer import LINEAR, load

D, F = 5, 3

# the check's arguments -> the kind of the one note that counts, "" for none.
NOTES = {
    "everything is compared": ({"layout": LINEAR}, ""),
    "no layout": ({}, "weights-not-compared"),
    "no gradients": ({"layout": LINEAR, "gradients": False}, "gradients-off"),
}


@pytest.mark.parametrize("row", NOTES)
def test_a_note_that_counts_is_a_doubt_under_strict(row):
    options, kind = NOTES[row]
    result, strict = linear(**options), linear(strict=True, **options)
    assert result.verdict is Verdict.PASS, str(result)
    assert kinds(result, "note") == kinds(strict, "doubt") == ([kind] if kind else [])
    assert strict.verdict is (Verdict.INCONCLUSIVE if kind else Verdict.PASS), str(strict)
    assert (kinds(result, "doubt"), kinds(strict, "note")) == ([], [])
    assert kinds(result, "standing note") == kinds(strict, "standing note")


@pytest.mark.slow
def test_the_standing_note_names_what_was_run_and_what_was_not():
    result = linear(transforms=("eager", "grad"))
    (scope,) = sentences(result, "scope")
    assert scope == (
        "checked at input (2, 5) under eager and grad: "
        "other shapes, jit, vmap and remat were not run"
    )
    assert f"note: {scope}" in str(result)
    everywhere = ("eager", "jit", "grad", "vmap", "remat")
    (_, scope) = linear(transforms=everywhere, layout=LINEAR).notes
    assert scope.endswith("under eager, jit, grad, vmap and remat: other shapes were not run")


class Positioned(torch.nn.Module):
    def forward(self, x, pos=None, kind=None, mask=None):
        return torch.sin(x + (torch.arange(D) if pos is None else pos) + kind)


def test_it_names_the_integers_that_the_reference_computes_itself():
    integers = {"pos": np.arange(D)[::-1].copy(), "kind": np.arange(D), "mask": np.arange(D) % 2}
    result = check(
        Positioned(),
        nnx.Linear(D, F, rngs=nnx.Rngs(0)),
        {"x": np.random.default_rng(0).standard_normal((2, D)), **integers},
        port_call=lambda module, x, pos, kind, mask: jnp.sin(x + pos + kind),
        transforms=("eager",),
    )
    (scope,) = sentences(result, "scope")
    assert "other shapes, calls without `pos`, jit" in scope


def test_a_failure_stays_one_and_notes_are_text_in_json():
    wrong, notes = findings("weights-differ", ["wrong"]), findings("one-row", ["open"])
    notes += (StandingNote("scope", "so"),)
    result = Result("float32", "cpu", (), failures=wrong, notes=notes)
    strict = result.strict()
    assert (strict.verdict, strict.doubts, strict.notes) == (Verdict.FAIL, ("open",), ("so",))
    assert json.loads(json.dumps(result.as_dict()))["notes"] == ["open", "so"]


def linear(**options):
    reference, port = torch.nn.Linear(D, F), nnx.Linear(D, F, rngs=nnx.Rngs(0))
    load(port, reference.state_dict(), LINEAR)
    call = {"reference_call": lambda m, input: m(input), "port_call": lambda m, input: m(input)}
    x = np.random.default_rng(0).standard_normal((2, D))
    return check(reference, port, {"input": x}, **{"transforms": ("eager",), **call, **options})
