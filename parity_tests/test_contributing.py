"""CONTRIBUTING's map: every file and folder that it names is there, and every room is on it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = {
    path
    for path in re.findall(r"`((?:jax_attn|torch_ref|parity_tests)/[\w/.]*)`", TEXT)
    if "NAME" not in path
}


@pytest.mark.parametrize("path", sorted(PATHS))
def test_what_it_names_is_there(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("inside", ["jax_attn", "jax_attn/parity"])
def test_every_room_is_on_the_map(inside):
    rooms = {f"{inside}/{p.parent.name}/" for p in (ROOT / inside).glob("*/__init__.py")}
    assert rooms
    assert rooms <= PATHS
