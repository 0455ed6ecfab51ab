"""`--slow-since REVISION` leaves out the slow tests of rooms that no change reaches."""

import subprocess

import pytest

from helpers.changed_rooms import EVERY, ROOT, calls_for, changed_since, rooms_to_test

pytest.importorskip("grimp")
# A changed file -> (rooms that it calls for, rooms that it does not).
CHANGES = {
    "jax_attn/parity/run/reference.py": (
        {"parity/run", "parity/checking", "selfcheck/matrix", "cli", "bench"},
        {"parity/judge", "transfer", "attention", "nn", "models"},
    ),
    "jax_attn/cli/port.py": ({"cli"}, {"parity/run", "transfer", "bench"}),
    "jax_attn/attention/kernels/__init__.py": ({"attention", "nn", "models"}, {"transfer"}),
    "jax_attn/parity/__init__.py": ({"parity/judge", "parity/run", "cli"}, {"transfer", "nn"}),
    "torch_ref/gqa.py": ({"torch_ref", "selfcheck/matrix"}, {"attention", "transfer"}),
    "parity_tests/models/test_generate.py": ({"models"}, {"nn", "cli", "parity/run"}),
    "parity_tests/parity/run/test_new.py": ({"parity/run"}, {"parity/checking"}),
    "docs/tutorial.md": ({"docs"}, {"cli", "parity/checking"}),
    "CHANGELOG.md": (set(), {"cli", "parity/checking"}),
}
OF_ALL = (
    "pyproject.toml",
    "parity_tests/helpers/dtype_rows.py",
    "parity_tests/conftest.py",
    "jax_attn/parity/removed.py",
)


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_calls_for_its_room_and_for_those_that_import_it(path):
    wanted, others = CHANGES[path]
    rooms = rooms_to_test([path])
    assert wanted <= rooms
    assert not others & rooms


@pytest.mark.parametrize("path", OF_ALL)
def test_what_all_tests_use_calls_for_all(path):
    assert rooms_to_test(["parity_tests/cli/test_cli.py", path]) == EVERY


def test_tests_outside_of_the_rooms_are_called_for_by_any():
    rooms = rooms_to_test(["jax_attn/cli/port.py"])
    called = {path for path in TESTS if calls_for(rooms, path)}
    assert called == {"parity_tests/cli/test_cli.py", *OUTSIDE}
    assert not any(calls_for(frozenset(), path) for path in TESTS)
    assert all(calls_for(EVERY, path) for path in TESTS)


OUTSIDE = ("parity_tests/test_docs.py", "parity_tests/plugin/test_pytest_plugin.py")
TESTS = (
    *OUTSIDE,
    "parity_tests/cli/test_cli.py",
    "parity_tests/parity/run/test_reference.py",
    "parity_tests/torch_ref/test_torch_ref.py",
)


def test_every_folder_of_tests_is_reached_by_some_change():
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "jax_attn").rglob("*.py")]
    rooms = rooms_to_test(paths)
    tests = [
        path.relative_to(ROOT).as_posix() for path in (ROOT / "parity_tests").rglob("test_*.py")
    ]
    missed = {path for path in tests if not calls_for(rooms, path)}
    assert all(path.startswith("parity_tests/torch_ref/") for path in missed)


def test_what_changed_is_told_by_git(monkeypatch, tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("kept", "changed", "removed"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-m", "a")
    (tmp_path / "removed").rename(tmp_path / "renamed")
    (tmp_path / "changed").write_text("anew")
    git("add", ".")
    monkeypatch.setattr("helpers.changed_rooms.ROOT", tmp_path)
    assert sorted(changed_since("HEAD")) == ["changed", "removed", "renamed"]
