"""Thousands of damaged checkpoints: each is refused by name, or read whole and right."""

import json
import random

import numpy as np
import pytest

from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint

INDEX = "model.safetensors.index.json"
TENSORS = {f"layers.{i}.weight": np.full((3, 5), i, np.float32) for i in range(4)}
SHORT, LONG = 500, 10_000
ODD = [
    *(None, True, 0, -1, 1e308, 2**64, "", ".", "..", "/", "\0", "\ud800", "x" * 300, [], {}),
    *("../model.safetensors", "/etc/passwd", INDEX, "model.bin", "folder.safetensors"),
    *("model-00001-of-00002.safetensors", "model-00009-of-00002.safetensors", "link.safetensors"),
]


@pytest.fixture
def count(request):
    return LONG if request.config.getoption("--long") else SHORT


def bytes_changed(text: bytes, rng: random.Random) -> bytes:
    """A few bytes written over, left out, put in, moved or repeated."""
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at, to = sorted(rng.choices(range(len(data) + 1), k=2))
        piece = data[at : min(to, at + 40)]
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + len(piece)]
            case 2:
                data[at:at] = rng.choice((b'"', b"{", b"]", b",", b"\\", b"9", b"\0", b"\xff"))
            case 3:
                data[to:to] = piece
            case 4:
                del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def meaning_changed(text: bytes, rng: random.Random) -> bytes:
    """Still JSON: something in it replaced, renamed, left out, or named twice."""
    document = json.loads(text)
    inner = document["weight_map"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        where = rng.choice((document, inner, inner, inner))
        key = rng.choice([*where, "more"])
        match rng.randrange(4):
            case 0:
                where[key] = rng.choice(ODD)
            case 1:
                where[str(rng.choice(ODD))] = where.pop(key, rng.choice(ODD))
            case 2:
                where.pop(key, None)
            case 3:
                where[key] = rng.choice([*inner.values(), None])
    return json.dumps(rng.choice((document, document, document, inner, [document]))).encode()


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "model.safetensors", TENSORS, shard_bytes=120)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "link.safetensors").symlink_to("link.safetensors")
    return tmp_path


def told(path, read) -> str:
    """Why `path` was refused; empty where it was opened, and `read` saw what it holds."""
    try:
        with load_checkpoint(path) as checkpoint:
            read(checkpoint)
    except TransferError as error:
        return str(error)
    except BaseException as error:
        error.add_note(f"file: {path.read_bytes()[:2000]!r}")
        raise
    return ""


def whole(checkpoint):
    assert checkpoint.keys() == TENSORS.keys()
    for key in checkpoint:
        np.testing.assert_array_equal(checkpoint[key], TENSORS[key], strict=True)


def as_described(checkpoint):
    """The format does not check values: what is read has the shape that its header says."""
    for key in checkpoint:
        spec = checkpoint.describe(key)
        try:
            array = checkpoint[key]
        except TransferError:
            continue
        assert (array.shape, array.dtype.name) == spec


@pytest.mark.parametrize("change", [bytes_changed, meaning_changed])
def test_a_damaged_index_is_refused_or_read_whole(folder, count, change):
    good = (folder / INDEX).read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(count // 2):
        (folder / INDEX).write_bytes(change(good, rng))
        reason = told(folder / INDEX, whole)
        refused += bool(reason)
        assert not reason or str(folder) in reason
    # most damage something that counts, and some only what is not looked at
    assert count // 4 < refused < count // 2


def test_a_damaged_file_is_refused_or_every_tensor_is_read_or_named(tmp_path, count):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, TENSORS)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(1)
    refused = 0
    for _ in range(count):
        path.write_bytes(bytes_changed(good[:header], rng) + good[header:])
        reason = told(path, as_described)
        refused += bool(reason)
        assert not reason or str(path) in reason
    assert count // 2 < refused < count


def test_what_is_compared_can_differ(folder):
    """A folder that is read, but is not what was written, would be seen."""
    assert told(folder / INDEX, whole) == ""
    changed = {key: array + 1 for key, array in TENSORS.items()}
    save_checkpoint(folder / "model.safetensors", changed, shard_bytes=120)
    with pytest.raises(AssertionError):
        told(folder / INDEX, whole)
