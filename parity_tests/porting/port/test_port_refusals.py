"""What `jax-attn port` refuses besides a wrong mapping: a bad target, a bad record, wrong usage."""

import os
import time

import numpy as np
import pytest
from click.testing import CliRunner

from helpers.transfer.port_cases import LLAMA, llama, ported, source_of
from jax_attn.cli import main
from jax_attn.transfer.files import staging

TARGETS = {
    "that is there": (lambda f: f / "there", "nothing is overwritten"),
    "in a file": (lambda f: f / "there" / "notes.txt" / "flax", "but it is not a folder"),
    "in no possible folder": (lambda f: f / ("a" * 300) / "flax", "a valid name for a folder"),
    "of no possible name": (lambda f: f / ("a" * 256), "expected a valid name for a folder"),
    "in a circle": (lambda f: f / "circle" / "flax", "expected a valid name for a folder"),
}


@pytest.fixture
def source(tmp_path):
    return source_of(tmp_path, llama(), LLAMA)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_refused(tmp_path, source, name):
    make, said = TARGETS[name]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    (tmp_path / "circle").symlink_to("circle")
    assert said in ported(source, make(tmp_path), "flax", status=2).stderr
    assert (tmp_path / "there" / "notes.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"there", "source", "circle"}


def test_folders_above_a_target_are_made_and_go_with_what_fails(tmp_path, source):
    ported(source, tmp_path / "a" / "b" / "flax", "flax")
    assert (tmp_path / "a" / "b" / "flax" / "port.json").is_file()
    with pytest.raises(KeyError), staging.staged(tmp_path / "c" / "d" / "flax"):
        raise KeyError
    assert not (tmp_path / "c").exists()


def test_the_longest_name_is_a_target(tmp_path, source):
    ported(source, tmp_path / ("a" * 255), "flax")
    assert (tmp_path / ("a" * 255) / "port.json").is_file()


def test_a_working_directory_that_is_gone_is_said(tmp_path, source, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = ported(source, "flax", "flax", status=2)
    assert "the working directory is gone" in done.stderr
    ported(source, tmp_path / "flax", "flax")
    table = ("--layout", "jax_attn.transfer.table.layouts:LINAER")
    assert "nearest: LINEAR" in ported(source, "flax", "flax", *table, status=2).stderr


def test_what_a_killed_port_left_is_said_and_removed_when_asked(tmp_path, source):
    """And nothing else: not a folder of another target, of a port at work, a file or a link."""
    left, others = tmp_path / ".flax.0a1b2c3d.partial", [".flaxen.0a1b2c3d.partial"]
    others += [".flax.x.0a1b2c3d.partial", ".flax.0a1b2c3d.partial.old", ".flax.00000000.partial"]
    for name in (left.name, *others):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / ".flax.11111111.partial").touch()
    (tmp_path / ".flax.22222222.partial").symlink_to(others[0])
    os.utime(left, (0, time.time() - 3 * 3600 - 60))
    done = ported(source, tmp_path / "flax", "flax", "--dry-run")
    killed = f"{left}: 3 hours old, of a port that was killed: --clean removes it"
    assert killed in done.stderr.splitlines()
    with staging._locked(tmp_path / ".flax.00000000.partial"):
        done = ported(source, tmp_path / "flax", "flax", "--clean")
    said = done.stderr.splitlines()
    assert said[0] == f"{left}: 3 hours old, of a port that was killed: removed"
    assert said[1].startswith(f"{tmp_path}/.flax.00000000.partial: ")
    assert said[1].endswith(" old, of a port that is still running: left alone")
    assert (tmp_path / "flax" / "port.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("source", "flax", ".flax.11111111.partial", ".flax.22222222.partial"),
        *others,
    }


def test_long_names_have_leftovers_of_their_own(tmp_path):
    long = [tmp_path / f"{'a' * 60}{letter}" for letter in "bc"]
    with staging.staged(long[0]):
        (left,) = staging.leftovers(long[0])
        assert left.at_work
        assert staging.remove(left) is False
        assert staging.leftovers(long[1]) == []
    assert staging.leftovers(long[0]) == []


def test_a_disk_that_refuses_leaves_nothing(tmp_path, source, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = ported(source, tmp_path / "flax", "flax", status=2)
    assert f"'{tmp_path}/flax" in done.stderr
    assert "No space left on device" in done.stderr
    assert ".partial" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_is_read_only_is_refused(tmp_path, source, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write
    assert "read-only" in ported(source, tmp_path / "flax", "flax", status=2).stderr


def test_a_record_that_is_none_is_an_error(tmp_path, source):
    ported(source, tmp_path / "flax", "flax")
    (tmp_path / "flax" / "port.json").write_text('{"keys": [1]}')
    done = ported(tmp_path / "flax", tmp_path / "back", "torch", status=2)
    assert "expected the record of a port" in done.stderr
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_a_flax_side_is_no_checkpoint_of_torchs(tmp_path, source, command, kind):
    ported(source, tmp_path / "flax", "flax", "--format", kind)
    done = CliRunner().invoke(main, [command, str(tmp_path / "flax")])
    assert done.exit_code == 2
    assert "the Flax side of a port" in done.stderr
    assert "--to torch" in done.stderr
    (tmp_path / "source" / "port.json").write_text("[]")  # of something else
    assert CliRunner().invoke(main, ["inspect", str(source)]).exit_code == 0


def test_a_port_the_wrong_way_round_is_refused_by_that_name(tmp_path, source):
    ported(source, tmp_path / "flax", "flax")
    ported(tmp_path / "flax", tmp_path / "back", "torch")
    for folder, to in (("flax", "flax"), ("back", "torch"), (source, "torch")):
        stderr = ported(tmp_path / folder, tmp_path / "new", to, status=2).stderr
        assert "port wrote nothing: 1 problem" in stderr
        other = {"flax": "torch", "torch": "flax"}[to]
        assert f"expected the {other} side of a checkpoint, got the {to} side" in stderr
        assert f"pass --to {other}" in stderr


USAGE = {
    "no colon": (("--layout", "json"), "expected package.module:TABLE"),
    "no such module": (("--layout", "no_such_module:X"), "does not import"),
    "a module that leaves": (("--layout", "leaves_at_once:X"), "SystemExit: 0"),
    "a module that raises": (("--layout", "raises:X"), "raises does not import: Own: why"),
    "a module that clears the path": (("--layout", "clears:X"), "Layouts ['TABLE'] in clears"),
    "an object of no class": (("--layout", "clears:ODD"), "Layouts ['TABLE'] in clears"),
    "no table": (("--layout", "jax_attn.transfer.table.layouts:LINAER"), "nearest: LINEAR"),
    "lossy alone": (("--lossy",), "--lossy needs --dtype"),
    "no source": ((), "does not exist"),
    "a source of no possible name": ((), "does not exist"),
}


MODULES = {
    "leaves_at_once": "import sys\nsys.exit(0)",
    "raises": "class Own(BaseException): pass\nraise Own('why')",
    "clears": """
import sys
from jax_attn.transfer import LINEAR as TABLE
sys.path.clear()
class Odd:
    @property
    def __class__(self):
        raise RuntimeError
ODD = Odd()
""",
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_names_the_option(tmp_path, monkeypatch, name):
    for module, text in MODULES.items():
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    options, said = USAGE[name]
    sources = {"no source": "gone", "a source of no possible name": "a" * 300}
    source = tmp_path / sources.get(name, "")
    assert said in ported(source, tmp_path / "flax", "flax", *options, status=2).stderr


STEPS = """
from jax_attn.transfer import Layout, Step, row

def same(held, *_):
    return held

def fails(*_):
    raise KeyError("why")

def table(**other):
    calls = dict.fromkeys(("source", "target", "forward", "backward"), same) | other
    return Layout(row("a", "b", Step("mine", **calls)))

"""
CALLS = ("source", "target", "forward", "backward")


@pytest.mark.parametrize("call", CALLS)
def test_a_step_of_the_users_that_raises_is_one_problem(tmp_path, monkeypatch, call):
    own = f"own_{call}"
    (tmp_path / f"{own}.py").write_text(f"{STEPS}TABLE = table({call}=fails)")
    monkeypatch.chdir(tmp_path)
    source = source_of(tmp_path, {"a": np.ones((3, 5), np.float32)}, None)
    done = ported(source, tmp_path / "flax", "flax", "--layout", f"{own}:TABLE", status=2)
    assert "1 problem\n" in done.stderr
    assert 'row("a", "b", mine): step mine raised KeyError: \'why\'' in done.stderr
    assert not (tmp_path / "flax").exists()
