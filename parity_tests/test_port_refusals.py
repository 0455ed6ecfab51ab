"""What `jax-attn port` refuses besides a wrong mapping: a bad target, a bad record, wrong usage."""

import os

import pytest
from port_cases import LLAMA, llama, ported, source_of

TARGETS = {
    "that is there": (lambda f: f / "there", "nothing is written over"),
    "in no folder": (lambda f: f / "gone" / "flax", "there is none"),
}


@pytest.fixture
def source(tmp_path):
    return source_of(tmp_path, llama(), LLAMA)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_refused(tmp_path, source, name):
    make, said = TARGETS[name]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    assert said in ported(source, make(tmp_path), "flax", status=2).stderr
    assert (tmp_path / "there" / "notes.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"there", "source"}


def test_a_disk_that_refuses_leaves_nothing(tmp_path, source, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = ported(source, tmp_path / "flax", "flax", status=2)
    assert "No space left on device" in done.stderr
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


USAGE = {
    "no colon": (("--layout", "json"), "expected package.module:TABLE"),
    "no such module": (("--layout", "no_such_module:X"), "does not import"),
    "a module that leaves": (("--layout", "leaves_at_once:X"), "SystemExit: 0"),
    "no table": (("--layout", "jax_attn.transfer.layouts:LINAER"), "nearest: LINEAR"),
    "lossy alone": (("--lossy",), "--lossy goes with --dtype"),
    "no source": ((), "none there"),
    "a source of no possible name": ((), "none there"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_names_the_option(tmp_path, monkeypatch, name):
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.chdir(tmp_path)
    options, said = USAGE[name]
    sources = {"no source": "gone", "a source of no possible name": "a" * 300}
    source = tmp_path / sources.get(name, "")
    assert said in ported(source, tmp_path / "flax", "flax", *options, status=2).stderr
