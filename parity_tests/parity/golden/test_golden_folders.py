"""Folders of golden references: whole or refused, with the damage named."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import jax_attn.parity.golden.folder as folders
import jax_attn.parity.golden.golden as goldens
from helpers.parity.up import IN, OUT
from jax_attn.parity import load_golden, prepare
from jax_attn.parity.golden.codec import TreeEncoder, decode
from jax_attn.parity.golden.folder import FolderContents
from jax_attn.transfer import TransferError


def test_the_digest_is_of_everything(linear, golden):
    reference, _, (x,), _ = linear
    other = torch.nn.Linear(IN, OUT)
    other.load_state_dict(reference.state_dict())
    assert prepare(other, (x,)).digest == golden.digest
    with torch.no_grad():
        other.bias[0] += 1
    others = [
        prepare(other, (x,)),
        prepare(reference, (2 * x,)),
        prepare(reference, (x,), seed=1),
        prepare(reference, (x,), gradients=False),
    ]
    assert len({golden.digest, *(each.digest for each in others)}) == 1 + len(others)


def _truncated(path):
    path.write_bytes(path.read_bytes()[:-20])


def _edited(path):
    held = bytearray(path.read_bytes())
    held[-1] ^= 1  # the last byte of an array
    path.write_bytes(held)


def _with(**changed):
    def change(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))

    return change


def _reworded(path):
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


DATA, ARRAYS = "golden.json", "arrays.safetensors"
DAMAGE = {
    "half-copied, without data": (DATA, lambda path: path.unlink(), "got no golden.json"),
    "half-copied, without arrays": (ARRAYS, lambda path: path.unlink(), "got no arrays"),
    "truncated data": (DATA, _truncated, "golden.json: expected a golden reference"),
    "truncated arrays": (ARRAYS, _truncated, "arrays.safetensors: cannot be read"),
    "edited data": (DATA, _reworded, "golden.json: was changed after it was written"),
    "edited arrays": (ARRAYS, _edited, "were changed after they were written"),
    "another digest": (DATA, _with(digest="0" * 64), "golden.json: was changed"),
    "no JSON": (DATA, lambda path: path.write_text("x"), "golden.json: expected a golden"),
    "data in a folder": (DATA, lambda path: (path.unlink(), path.mkdir()), "got no golden.json"),
    "a newer format": (DATA, _with(format=2), "expected format 1 or older, got 2"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused_and_the_damage_named(name, folder):
    file, damage, message = DAMAGE[name]
    load_golden(folder)
    damage(folder / file)
    with pytest.raises(ValueError, match=message):
        load_golden(folder)


def test_a_folder_that_is_missing_or_another_is_refused(folder, golden, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_golden(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"with digest {'0' * 64}, got {golden.digest}"):
        load_golden(folder, expect_digest="0" * 64)
    for same in (golden.digest.upper(), f" {golden.digest}\n"):
        assert load_golden(folder, expect_digest=same).digest == golden.digest
    for none in ("", golden.digest[:12], f"sha256:{golden.digest}"):
        with pytest.raises(ValueError, match="expect_digest: expected 64 hexadecimal digits"):
            load_golden(folder, expect_digest=none)
    for name, what in {DATA: "a file", "n" * 300: "File name too long"}.items():
        with pytest.raises(ValueError, match=f"expected a folder with .*, got .*{what}"):
            load_golden(folder / name)
    replace(golden, seed=1).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / DATA, folder / DATA)
    with pytest.raises(ValueError, match="with digest"):
        load_golden(folder, expect_digest=golden.digest)


def test_nothing_is_overwritten_and_nothing_half_written(golden, folder, monkeypatch):
    with pytest.raises(TransferError, match="does not exist yet"):
        golden.save(folder)

    def full(path, arrays):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(folders, "save_checkpoint", full)
    with pytest.raises(TransferError, match="No space left"):
        golden.save(folder.with_name("second"))
    assert [path.name for path in folder.parent.iterdir()] == ["golden"]


def test_much_is_written_only_after_a_yes(golden, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(goldens, "LARGE", 100)
    with pytest.raises(ValueError, match=f"expected a yes to {golden.size:,} bytes"):
        golden.save(tmp_path / "golden")
    assert not (tmp_path / "golden").exists()
    assert f"{golden.size:,} bytes" in capsys.readouterr().err
    golden.save(tmp_path / "golden", yes=True)
    assert golden.digest in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 16), ("bfloat16", 18)])
def test_a_parameter_takes_as_many_bytes_as_is_said(dtype, bytes_each):
    rows, width = 101, 97
    reference = torch.nn.Linear(width, rows).to(getattr(torch, dtype))
    size = prepare(reference, (np.ones((1, width)),), dtype=dtype).size
    assert bytes_each < size / (rows * width) < bytes_each + 2.5


def _raising(error):
    def asked(*args, **kwargs):
        raise error

    return asked


def test_the_end_of_the_input_is_no_yes_and_ctrl_c_is_none(golden, tmp_path, monkeypatch):
    monkeypatch.setattr(goldens, "LARGE", 100)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    prompt = "click.termui.visible_prompt_func"
    monkeypatch.setattr(prompt, _raising(EOFError()))
    with pytest.raises(ValueError, match="expected a yes"):
        golden.save(tmp_path / "golden")
    monkeypatch.setattr(prompt, _raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        golden.save(tmp_path / "golden")


def test_data_that_cannot_be_read_are_told(folder, monkeypatch):
    monkeypatch.setattr(folders, "read_json", _raising(PermissionError(13, "Permission denied")))
    with pytest.raises(ValueError, match=r"golden\.json: .*Permission denied"):
        load_golden(folder)


class Other:
    pass


def test_only_known_types_are_written_or_made(golden):
    with pytest.raises(TypeError, match="cannot hold Linear at /answers/weights"):
        TreeEncoder(goldens.TYPES).encode(
            replace(golden, answers={"weights": torch.nn.Linear(1, 1)})
        )
    for data in ({"$": "Other"}, {"$": "os.system", "command": "true"}, {"no": "type"}):
        with pytest.raises(LookupError):
            decode(data, {}, goldens.TYPES)


def test_what_is_written_is_read_back():
    values = (None, True, 3, 0.1, -np.inf, "a", frozenset("ab"), {"$": ("x", {})}, np.arange(3))
    for dtype in ("complex64", "complex128"):
        for shape in ((), (0, 3), (2, 3)):
            array = np.full(shape, complex(-0.0, np.nan), dtype)
            (pairs := TreeEncoder({})).encode(array, "a")
            assert pairs.arrays["a"].dtype.kind == "f"
            back = decode(pairs.encode(array), pairs.arrays, {})
            assert (back.dtype, back.shape) == (array.dtype, shape)
            assert back.tobytes() == array.tobytes()
    encoder = TreeEncoder({})
    data = json.loads(json.dumps(encoder.encode(values), allow_nan=False))
    *others, array = decode(data, encoder.arrays, {})
    assert (*others,) == values[:-1]
    assert array is values[-1]
    twice = FolderContents.of(*(lambda e: (e.encode(2 * (values[-1],)), e.arrays))(TreeEncoder({})))
    assert len(twice.arrays) == 1
