"""What every bad checkpoint is told: file by file, index by index, and all problems at once."""

import json
import os

import numpy as np
import pytest

from jax_attn.transfer import TransferError, load_checkpoint


def header(text, data=b"\0" * 4):
    return len(text).to_bytes(8, "little") + text.encode() + data


def entry(dtype="F32", shape=(1,), begin=0, end=4):
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


ENTRY = entry()
GOOD = header(f'{{"a":{ENTRY}}}')
OTHER = header(f'{{"b":{ENTRY}}}')
AB = header(f'{{"a":{ENTRY},"b":{entry(begin=4, end=8)}}}', b"\0" * 8)
BOTH = header(f'{{"b":{ENTRY},"c":{entry(begin=4, end=8)}}}', b"\0" * 8)
NOT_WHOLE = "expected a complete safetensors file"
BAD_FILES = {
    "empty": (b"", "0 bytes"),
    "header cut": (GOOD[:20], "20 bytes"),
    "data cut": (GOOD[:-1], f"{len(GOOD) - 1} bytes"),
    "data left over": (GOOD + b"\0", NOT_WHOLE),
    "garbage": (bytes(range(256)) * 4, NOT_WHOLE),
    "a pickle by another name": (b"\x80\x02}q\x00." * 40, NOT_WHOLE),
    "header not JSON": (header("{nonsense}"), NOT_WHOLE),
    "header a list": (header("[]"), NOT_WHOLE),
    "header not UTF-8": ((2).to_bytes(8, "little") + b"{\xff", NOT_WHOLE),
    "header nested without end": (header("[" * 100_000), NOT_WHOLE),
    "a header that claims more than 100 MB": (b"\xff" * 64, NOT_WHOLE),
    "a name twice": (header(f'{{"a":{ENTRY},"a":{ENTRY}}}'), "more than once: ['a']"),
    "a field twice": (header(f'{{"a":{ENTRY[:-1]},"dtype":"F32"}}}}'), "duplicate field"),
    "overlapping": (header(f'{{"a":{ENTRY},"b":{entry(begin=2, end=6)}}}', b"\0" * 6), NOT_WHOLE),
    "the same bytes twice": (header(f'{{"a":{ENTRY},"b":{ENTRY}}}'), NOT_WHOLE),
    "a hole": (header(f'{{"a":{entry(begin=4, end=8)}}}', b"\0" * 8), NOT_WHOLE),
    "ends before it begins": (header(f'{{"a":{entry(begin=4, end=0)}}}'), NOT_WHOLE),
    "a shape of other bytes": (header(f'{{"a":{entry(shape=(2,))}}}'), NOT_WHOLE),
    "a shape beyond all memory": (header(f'{{"a":{entry(shape=(2**63, 2**63))}}}'), NOT_WHOLE),
    "a negative shape": (header(f'{{"a":{entry(shape=(-1, -1))}}}'), NOT_WHOLE),
    "an unknown dtype": (header(f'{{"a":{entry("X9")}}}'), "X9"),
}


def test_the_file_that_the_bad_ones_vary_is_good(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    with load_checkpoint(tmp_path / "model.safetensors") as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], np.zeros(1, np.float32), strict=True)


@pytest.mark.parametrize(("content", "reason"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_named_with_its_reason(tmp_path, content, reason):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(TransferError) as error:
        load_checkpoint(path)
    (problem,) = error.value.problems
    assert (problem.kind, problem.name) == ("file", str(path))
    assert reason in problem.text


FOREIGN = {  # the format's name -> a tensor of 8 numbers
    "F8_E4M3": entry("F8_E4M3", (8,), 0, 8),
    "F8_E5M2": entry("F8_E5M2", (8,), 0, 8),
    "F8_E8M0": entry("F8_E8M0", (8,), 0, 8),
    "F4": entry("F4", (8,), 0, 4),
    "F6_E2M3": entry("F6_E2M3", (8,), 0, 6),
    "C64": entry("C64", (1,), 0, 8),
}


@pytest.mark.parametrize("dtype", FOREIGN)
def test_a_dtype_that_is_not_carried_is_named_when_it_is_read(tmp_path, dtype):
    end = json.loads(FOREIGN[dtype])["data_offsets"][1]
    text = f'{{"a":{FOREIGN[dtype]},"b":{entry(begin=end, end=end + 4)}}}'
    (tmp_path / "model.safetensors").write_bytes(header(text, b"\0" * (end + 4)))
    with load_checkpoint(tmp_path / "model.safetensors") as checkpoint:
        np.testing.assert_array_equal(checkpoint["b"], [0])
        assert checkpoint.describe("a").dtype == dtype
        assert checkpoint.describe("a").nbytes == end
        with pytest.raises(TransferError, match=dtype) as error:
            checkpoint["a"]
    assert [(p.kind, p.name) for p in error.value.problems] == [("unreadable", "a")]


def folder_of(*content):
    """A builder: files by name, JSON for dicts."""

    def build(folder):
        for name, value in content:
            text = value if isinstance(value, bytes) else json.dumps(value).encode()
            (folder / name).write_bytes(text)
        return folder

    return build


def folder_in(name):
    """A builder: a folder with another in it."""

    def build(folder):
        (folder / name).mkdir()
        return folder

    return build


def beside(name, *content):
    """A builder: the same, and the path of one more name there."""
    return lambda folder: folder_of(*content)(folder) / name


def named(**weight_map):
    """A builder: an index, and two good files."""
    return folder_of((INDEX, {"weight_map": weight_map}), ("x.safetensors", GOOD), y(OTHER))


def y(content):
    return "y.safetensors", content


INDEX = "model.safetensors.index.json"
X, Y = "x.safetensors", "y.safetensors"
NOT_AN_INDEX = "expected a JSON object with a weight_map"
NO_NAME = "expected the name of a file next to it"
BAD_PATHS = {
    "no such file": (beside("model.safetensors"), "no such file"),
    "a name one letter off": (
        beside("modle.safetensors", ("model.safetensors", GOOD)),
        "nearest: model.safetensors",
    ),
    "another extension": (beside("model.npz", ("model.npz", GOOD)), "expected a .safetensors, "),
    "no extension": (beside("model"), "or a folder of them, got 'model'"),
    "an impossible name": (beside("a\0b.safetensors"), "no such file"),
    "a name too long": (beside("a" * 999 + ".safetensors"), "no such file"),
    "a part of what has none": (
        lambda folder: (beside("model.safetensors", ("model.safetensors", GOOD))(folder), "model"),
        "for safetensors, got 'model'",
    ),
    "an empty folder": (folder_of(), "expected *.safetensors or *.bin in the folder, got []"),
    "other files in a folder": (folder_of(("config.json", {})), "got ['config.json']"),
    "a tensor in two files": (folder_of((X, GOOD), (Y, GOOD)), "in several, y.safetensors"),
    "a folder of the usual name": (folder_in("model.safetensors"), "not a file"),
    "one shard cut": (folder_of((X, GOOD), (Y, GOOD[:-1])), "y.safetensors"),
    "shards without their index": (
        folder_of(("model-00001-of-00002.safetensors", GOOD)),
        "expected an index of these shards",
    ),
    "two indices": (
        folder_of(("a.safetensors.index.json", {}), ("b.safetensors.index.json", {})),
        "expected one checkpoint in the folder, got ['a.safetensors.index.json', 'b.",
    ),
    "a shard missing": (folder_of((INDEX, {"weight_map": {"a": X}})), "no such file"),
    "not JSON": (folder_of((INDEX, b"{")), NOT_AN_INDEX),
    "not text": (folder_of((INDEX, b"\xff\xfe\xfd")), NOT_AN_INDEX),
    "empty": (folder_of((INDEX, b"")), NOT_AN_INDEX),
    "nested without end": (folder_of((INDEX, b"[" * 100_000)), NOT_AN_INDEX),
    "a list": (folder_of((INDEX, b"[]")), NOT_AN_INDEX),
    "no names": (folder_of((INDEX, {})), NOT_AN_INDEX),
    "a list of names": (folder_of((INDEX, {"weight_map": [1]})), NOT_AN_INDEX),
    "a key twice": (
        folder_of((INDEX, b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}')),
        "more than once: ['a']",
    ),
    "nothing named": (named(), "expected at least one name"),
    "a file of several left out": (
        folder_of(
            (INDEX, {"weight_map": {"a": "m-00001-of-00002.safetensors"}}),
            ("m-00001-of-00002.safetensors", GOOD),
            ("m-00002-of-00002.safetensors", OTHER),
        ),
        "expected 2 files named alike, got ['m-00001-of-00002.safetensors']",
    ),
    "a number": (named(a=1), f"{NO_NAME} (.safetensors, .bin, .pt, .pth, .ckpt), got 1"),
    "no name": (named(a=""), NO_NAME),
    "a list for a name": (named(a=[X]), NO_NAME),
    "the folder itself": (named(a="."), NO_NAME),
    "up and out": (named(a="../x.safetensors"), f"{NO_NAME} (.safetensors, .bin"),
    "down and away": (named(a="sub/x.safetensors"), NO_NAME),
    "absolute": (named(a="/etc/passwd"), NO_NAME),
    "absolute, and a checkpoint": (named(a="/x.safetensors"), NO_NAME),
    "another kind of file": (named(a="config.json"), NO_NAME),
    "an impossible name in it": (named(a="a\0b.safetensors"), "no such file"),
    "half a character": (named(a="\ud800.safetensors"), "no such file"),
    "a tensor that is not there": (named(a=X, b=Y, c=Y), "missing: 'c': expected in y.safetensors"),
    "a tensor that is elsewhere": (
        folder_of((INDEX, {"weight_map": {"b": X, "c": Y, "a": X}}), (X, GOOD), y(BOTH)),
        "1 problem\n  - missing: 'b': expected in x.safetensors, as model.safetensors.index.json "
        "says, got it in y.safetensors",
    ),
    "a tensor in a second file too": (
        folder_of((INDEX, {"weight_map": {"a": X, "b": X, "c": Y}}), (X, AB), y(BOTH)),
        "1 problem\n  - unexpected: 'b': expected in y.safetensors only what",
    ),
    "a tensor not named": (
        folder_of((INDEX, {"weight_map": {"a": X}}), (X, AB)),
        "1 problem\n  - unexpected: 'b'",
    ),
}


@pytest.mark.parametrize(("build", "reason"), BAD_PATHS.values(), ids=BAD_PATHS)
def test_a_bad_path_is_named_with_its_reason(tmp_path, build, reason):
    path = build(tmp_path)
    path, part = path if isinstance(path, tuple) else (path, None)
    with pytest.raises(TransferError) as error:
        load_checkpoint(path, part=part)
    assert str(tmp_path) in str(error.value)
    assert reason in str(error.value)


def test_the_index_that_the_bad_ones_vary_is_good(tmp_path):
    with load_checkpoint(named(a=X, b=Y)(tmp_path)) as checkpoint:
        assert {**checkpoint} == {"a": [0.0], "b": [0.0]}


def test_every_problem_is_told_at_once(tmp_path):
    build = folder_of(
        (INDEX, {"weight_map": {"a": "gone.safetensors", "b": X, "c": Y}}),
        (X, GOOD[:-1]),
        y(b""),
    )
    with pytest.raises(TransferError) as error:
        load_checkpoint(build(tmp_path))
    files = ["gone.safetensors", X, Y]
    assert [p.name for p in error.value.problems] == [str(tmp_path / name) for name in files]


@pytest.mark.slow
def test_hundreds_of_problems_are_told_quickly(tmp_path):
    """Names are compared with one another for hints: for those that are shown alone."""
    key = "model.layers.{}.attention.{}.weight"
    keys = {key.format(i, n): X for i in range(100) for n in ("query", "key", "value")}
    entries = {k.replace("weight", "wieght"): json.loads(entry("F32", (0,), 0, 0)) for k in keys}
    build = folder_of((INDEX, {"weight_map": keys}), (X, header(json.dumps(entries), b"")))
    with pytest.raises(TransferError) as error:
        load_checkpoint(build(tmp_path))
    assert len(error.value.problems) == 2 * len(keys)
    assert "nearest: model.layers.0.attention.key.wieght" in error.value.problems[0].hint


def test_what_is_no_file_does_not_keep_us_waiting(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(TransferError, match="not a file"):
        load_checkpoint(tmp_path / "model.safetensors")
