"""The private names of torch that translating uses are there, and do what it expects of them."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

from jax_attn.translate.tracing import private
from jax_attn.translate.tracing.source.frames import frames, is_reference, reference_frames


class Helped(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = self.helper(x)
        return y * x[:, : x.shape[1] // 2].sum()

    def helper(self, x):
        return x.sin() if x.shape[0] > 2 else x


@pytest.fixture(scope="module")
def program():
    auto = torch.export.Dim.AUTO
    with private.seeing_all(reference_frames):
        return torch.export.export(
            Helped(), (torch.randn(5, 7),), dynamic_shapes=({0: auto, 1: auto},), strict=False
        )


@pytest.mark.slow
def test_frames_of_helpers_are_recorded(program):
    body = next(node for node in program.graph.nodes if node.target is private.SET_GRAD)
    inner = program.graph_module.get_submodule(body.args[1].target)
    (sin,) = (node for node in inner.graph.nodes if node.op == "call_function")
    assert [frame.function for frame in frames(sin)][-2:] == ["forward", "helper"]


def test_conditions_have_their_lines(program):
    (guard,) = (each for each in private.guards(program) if each.is_python)
    assert guard.file == __file__
    assert isinstance(guard.asked_by, str)
    assert str(guard.expression).endswith("> 2")


def test_patches_are_taken_back(program):
    for owner, name in (
        (_ModuleStackTracer, "_filter_traceback_frames"),
        (symbolic_shapes.ShapeEnv, "_get_sloc"),
        (torch.inference_mode, "__enter__"),
    ):
        assert getattr(owner, name).__module__ != private.__name__


def test_a_value_of_a_tensor_as_a_size_is_seen():
    class Positive(nn.Module):
        def forward(self, x):
            return x.nonzero()

    found = torch.export.export(Positive(), (torch.ones(3),), strict=False)
    assert any(map(private.unbacked, found.graph.nodes))


def test_modules_whose_source_reads_training_are_seen():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))
    with private.training_readers(is_reference) as readers:
        net.train(False)
        assert torch.equal(net[0](torch.ones(3)), torch.ones(3))
    assert readers == {net[0]}
    assert not net[0].training
    assert "training" not in vars(nn.Module)


def test_only_torch_itself_is_no_source_of_the_reference():
    (folder,) = torch.__path__
    assert not is_reference(f"{folder}/functional.py")
    assert is_reference(f"{folder}vision/ops/stochastic_depth.py")


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_draft_of_an_export_leaves_no_log_and_no_open_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = [*Path("/proc/self/fd").iterdir()] if Path("/proc/self/fd").exists() else []
    (first, *_) = private.drafted(Branches(), {"args": (torch.randn(5, 7),), "strict": False})
    assert first[0] == "DATA_DEPENDENT_ERROR"
    assert [*tmp_path.iterdir()] == []
    if files:
        assert len([*Path("/proc/self/fd").iterdir()]) == len(files)
