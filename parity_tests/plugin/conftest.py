"""Runs of pytest in this process, with a stand-in for `check`."""

import pytest

from helpers.pytest_runs import OPTIONS, STAND_IN


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs the given test file, in this process, with the stand-in for `check`."""
    monkeypatch.setattr("jax_attn.pytest_report._environment", lambda: {"python": "3"})

    def run(source, *options):
        pytester.makeconftest(STAND_IN)
        pytester.makepyfile(test_it="import pytest\n" + source)
        return pytester.runpytest_inprocess(*OPTIONS, *options)

    return run
