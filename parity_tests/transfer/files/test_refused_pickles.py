"""Files of torch that are refused, whole or in part: each with its reason, and nothing is run."""

import pickle

import numpy as np
import pytest
import torch

from helpers.transfer.pickles import FORMS, PACKED, STATE, saved
from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint


class Runs:
    """Pickled, it would make a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def written(content):
    return lambda path: path.write_bytes(content)


def of(what, zipped=True):
    return lambda path: saved(path, what, zipped)


def cut(what, zipped=True):
    def write(path):
        saved(path, what, zipped)
        path.write_bytes(path.read_bytes()[:-200])

    return write


SPLIT = {"a": STATE, "b": STATE, "c": {}}
BAD = {  # what is in the file, the part asked for, what is said
    "empty": (written(b""), None, "(0 bytes) as weights only: EOFError"),
    "garbage": (written(b"nonsense" * 50), None, "Unsupported operand 110"),
    "one byte": (written(b"x"), None, "(1 bytes) as weights only"),
    "a zip cut": (cut(STATE), None, "PytorchStreamReader failed reading zip archive"),
    "a legacy file cut": (cut(STATE, False), None, "as weights only"),
    "an empty zip": (written(b"PK\x05\x06" + b"\0" * 18), None, "as weights only"),
    "safetensors": (
        lambda path: (
            save_checkpoint(path.with_suffix(".safetensors"), STATE)
            or path.with_suffix(".safetensors").rename(path)
        ),
        None,
        "as weights only",
    ),
    "a whole module": (of(torch.nn.Linear(2, 2)), None, "torch.nn.modules.linear.Linear"),
    "a script": (
        lambda path: torch.jit.save(torch.jit.script(torch.nn.Identity()), str(path)),
        None,
        "TorchScript",
    ),
    "a tensor": (of(torch.ones(2)), None, "expected a mapping of names to tensors, got Tensor"),
    "numbers for names": (of({0: torch.ones(2)}), None, "expected strings as names of tensors"),
    "a list": (of([torch.ones(2)]), None, "expected a mapping of names to tensors, got list"),
    "no tensor at all": (of({"epoch": 3}), None, "expected names and tensors, got ['epoch']"),
    "two parts": (of(SPLIT), None, "take --part a or --part b; in Python, part='a' or part='b'"),
    "no such part": (of({"state_dict": STATE}), "state_dit", "nearest: state_dict"),
    "no such part of a part": (
        of({"a": {"b": STATE}}),
        "a.c",
        "part: expected one of its keys, got 'a.c'; they are ['a'] nearest: a.b",
    ),
    "a part of no mapping": (of([1]), "state_dict", "part: expected one of its keys"),
    "a part without tensors": (of({"model": {"epoch": 3}}), "model", "got ['epoch']"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # scripts
@pytest.mark.parametrize(("write", "part", "reason"), BAD.values(), ids=BAD)
def test_a_bad_pickle_is_named_with_its_reason(tmp_path, write, part, reason):
    path = tmp_path / "m.pt"
    write(path)
    with pytest.raises(TransferError) as error:
        load_checkpoint(path, part=part)
    (problem,) = error.value.problems
    assert (problem.kind, problem.name) == ("file", str(path))
    assert reason in f"{problem.text} {problem.hint}"


PAYLOADS = {
    "zip": lambda what, path: saved(path, what),
    "legacy": lambda what, path: saved(path, what, zipped=False),
    "a bare pickle": lambda what, path: path.write_bytes(pickle.dumps(what, protocol=2)),
}


@pytest.mark.parametrize("write", PAYLOADS.values(), ids=PAYLOADS)
def test_a_malicious_pickle_is_refused_and_nothing_in_it_runs(tmp_path, write):
    path, trace = tmp_path / "m.bin", tmp_path / "it ran"
    write({"a": torch.ones(2).tolist(), "b": Runs(trace)}, path)
    with pytest.raises(TransferError) as error:
        load_checkpoint(path)
    assert "open" in str(error.value)
    for advice in ("weights_only", "trust", "add_safe_globals"):
        assert advice not in str(error.value)
    assert not trace.exists()


def test_the_payload_would_have_run(tmp_path):
    trace = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Runs(trace))).close()
    assert trace.exists()


ODD = {
    "meta": (lambda: torch.ones(2, device="meta"), "meta device"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "call .to_dense() first"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), "call .to_dense() first"),
    "a number": (lambda: 3, "got int"),
    "text": (lambda: "relu", "got str"),
    "a mapping": (lambda: {"b": torch.ones(2)}, "got dict"),
    "nothing": (lambda: None, "got NoneType"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's sparse tensors are in beta
@pytest.mark.parametrize(("make", "reason"), ODD.values(), ids=ODD)
def test_what_is_no_array_among_tensors_is_named_when_it_is_read(tmp_path, make, reason):
    with load_checkpoint(saved(tmp_path / "m.bin", {"good": PACKED, "odd": make()})) as checkpoint:
        np.testing.assert_array_equal(checkpoint["good"], PACKED)
        for look in (checkpoint.describe, checkpoint.mapped, checkpoint.__getitem__):
            with pytest.raises(TransferError) as error:
                look("odd")
            (problem,) = error.value.problems
            assert (problem.kind, problem.name) == ("unreadable", "odd")
            assert reason in problem.text
        assert checkpoint.tied() == {}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("zipped", FORMS.values(), ids=FORMS)
def test_a_quantised_tensor_is_named_when_it_is_read(tmp_path, zipped):
    odd = torch.quantize_per_tensor(torch.ones(2, 3), scale=0.1, zero_point=0, dtype=torch.qint8)
    path = saved(tmp_path / "m.bin", {"good": PACKED, "odd": odd}, zipped)
    with load_checkpoint(path) as checkpoint:
        with pytest.raises(TransferError, match="dequantize"):
            checkpoint["odd"]
        with pytest.raises(TransferError, match="dequantize"):
            save_checkpoint(tmp_path / "m.safetensors", checkpoint)
    assert not (tmp_path / "m.safetensors").exists()
