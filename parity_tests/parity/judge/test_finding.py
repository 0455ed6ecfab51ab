"""A finding is a sentence that keeps its kind wherever it goes."""

import copy
import json
import pickle

import pytest

from jax_attn.parity.judge.finding import KINDS, Finding, StandingNote, findings


@pytest.mark.parametrize("make", [Finding, StandingNote])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_it_is_a_string_that_keeps_its_kind_in_another_process(make, way):
    finding = make("scope", "checked at x")
    again = way(finding)
    assert (type(again), again.kind, again) == (make, "scope", "checked at x")
    assert json.dumps([again]) == '["checked at x"]'


def test_a_prefix_changes_neither_kind_nor_weight():
    after = StandingNote("scope", "checked at x").after("jit y: ")
    assert (type(after), after.kind, after) == (StandingNote, "scope", "jit y: checked at x")


def test_a_kind_that_no_table_names_is_refused():
    with pytest.raises(ValueError, match=r"expected one of over-budget, .*got 'other'"):
        Finding("other", "a sentence")
    assert findings("scale", ()) == ()
    assert all(kind.replace("-", "").isalpha() and kind.islower() for kind in KINDS)
