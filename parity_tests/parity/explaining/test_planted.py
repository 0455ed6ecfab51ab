"""Bugs that were planted without knowledge of the causes that `explain` tries.

With --long every bug is explained, and without it one.
"""

import pytest

from helpers.attack.layers import MODELS, Bug, explain
from helpers.attack.planted import BUGS, KNOWN, NARROW, QUICK


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--long")
    if "bug" in metafunc.fixturenames:
        bugs = [bug for bug in BUGS if every or bug.name == QUICK]
        metafunc.parametrize("bug", bugs, ids=lambda bug: f"{bug.model}: {bug.name}")
    if "model" in metafunc.fixturenames:
        metafunc.parametrize("model", MODELS if every else ["vit"])


@pytest.mark.slow
def test_first_region_is_narrow_at_the_site_and_no_confirmed_cause_is_wrong(bug: Bug):
    explanation = explain(bug.model, bug.names, bug.backward)
    assert explanation.verdict == "FAIL"
    misses = set()
    first = explanation.regions[0]
    if bug.site not in f"{first.first_wrong.theirs}, {first.after.theirs}":
        misses.add("site")
    if len(first.equations) > NARROW:
        misses.add("wide")
    confirmed = [
        cause.name for region in explanation.regions for cause in region.causes if cause.confirmed
    ]
    if not all(name.startswith(bug.causes) for name in confirmed):
        misses.add("wrong cause")
    if bug.causes and not confirmed:
        misses.add("no cause")
    assert misses == set(KNOWN.get(bug.name, {})), (confirmed, explanation.sentence)


def test_right_model_has_no_region(model: str):
    explanation = explain(model, gradients=True)
    assert (str(explanation.verdict), explanation.regions) == ("PASS", ())
