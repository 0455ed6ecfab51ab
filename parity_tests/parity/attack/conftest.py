"""Whole models take minutes: their file is collected with --long alone."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    short = not config.getoption("--long")
    return True if short and collection_path.name == "test_wrong_models.py" else None
