"""What the bench has for GPUs, as far as a CPU shows it: backends insisted on, and who refuses."""

import sys
import types
import warnings
from pkgutil import resolve_name

import pytest
import torch
from torch.nn.attention import SDPBackend

from jax_attn.bench.arrays import seeded_arrays
from jax_attn.bench.implementations import IMPLEMENTATIONS
from jax_attn.bench.presets import PRESETS
from jax_attn.bench.programs import torch_programs
from jax_attn.bench.programs.program import UnsuitedError
from jax_attn.bench.workload import Workload
from jax_attn.transfer.arrays import as_torch

CORE = Workload("core", False, 2, 13, 13, 4, 2, 8, is_causal=True)


def tensors(workload=CORE) -> dict[str, torch.Tensor]:
    return {name: as_torch(a) for name, a in seeded_arrays(workload).items()}


def program(name: str, workload=CORE):
    implementation, given = IMPLEMENTATIONS[name], tensors(workload)
    return resolve_name(implementation.core)(workload, given, **implementation.options), given


def called(name: str) -> torch.Tensor:
    made, given = program(name)
    return made.call(*(given[x] for x in ("query", "key", "value")))


def test_the_backend_that_was_insisted_on_runs_and_is_named():
    made, _ = program("sdpa flash")
    assert (made.kernel, made.writes_scores) == ("SDPA flash", False)
    assert torch.equal(called("sdpa flash"), called("sdpa"))


def test_only_that_one_is_allowed_within_a_call_and_all_are_afterwards(monkeypatch):
    allowed = []

    def fused(*args, **options):
        allowed.append(torch.nn.attention._cur_sdpa_kernel_backends())
        return args[0]

    before = torch.nn.attention._cur_sdpa_kernel_backends()
    monkeypatch.setattr(torch_programs.F, "scaled_dot_product_attention", fused)
    called("sdpa flash")
    called("sdpa")
    assert allowed == [[SDPBackend.FLASH_ATTENTION], before]
    assert len(before) > 1
    assert torch.nn.attention._cur_sdpa_kernel_backends() == before


@pytest.mark.parametrize("name", ["sdpa cudnn", "sdpa efficient"])
def test_one_that_cannot_run_here_is_refused_with_torchs_own_reason(name):
    with pytest.raises(UnsuitedError, match=r"No (viable|available)"):
        program(name)


def test_what_torch_warns_of_is_part_of_the_reason(monkeypatch):
    def choice(*args, **options):
        warnings.warn("heads are too wide (Triggered internally at a.cpp:1)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    with pytest.raises(UnsuitedError) as refused:
        program("sdpa cudnn")
    assert str(refused.value) == "heads are too wide; No available kernel. Aborting execution."


def test_flash_attn_names_what_it_does_not_take_and_is_called_where_it_takes_it(monkeypatch):
    def flash_attn_func(query, key, value, causal):
        return query, causal

    there = types.SimpleNamespace(flash_attn_func=flash_attn_func, __version__="2.8")
    monkeypatch.setitem(sys.modules, "flash_attn", there)
    with pytest.raises(UnsuitedError) as refused:
        program("flash-attn")
    assert str(refused.value) == "takes a GPU, got cpu; takes float16 or bfloat16, got float32"

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    half = Workload("half", False, 2, 13, 13, 4, 2, 8, is_causal=True, dtype="bfloat16")
    made, given = program("flash-attn", half)
    query, causal = made.call(*(given[x] for x in ("query", "key", "value")))
    assert (made.kernel, causal, query is given["query"]) == ("flash-attn 2.8", True, True)


def test_where_flash_attn_is_not_installed_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("jax_attn.bench.implementations.present", lambda name: False)
    said = IMPLEMENTATIONS["flash-attn"].absent
    assert said == "flash_attn not installed: pip install flash-attn --no-build-isolation"


def test_the_preset_has_as_many_tokens_at_each_length_in_wide_heads():
    found = PRESETS["gpu"]
    assert {(w.N, w.H, w.B * w.T) for w in found} == {(16, 128, 16384)}
    assert [(w.T, w.is_causal) for w in found] == [
        (L, causal) for L in (2048, 8192, 16384) for causal in (False, True)
    ]
