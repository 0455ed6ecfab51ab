"""Settings for the tests of pairs."""

from collections.abc import Iterator

import pytest

from jax_attn.bench.engine import rounds


@pytest.fixture(scope="module", autouse=True)
def small_rooflines() -> Iterator[None]:
    """What a pair's times are compared with takes no time here."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(rounds.SIZES, "cpu", 61)
        monkeypatch.setattr(rounds, "READ", 4096)
        yield
