"""The bench's presets, and the arrays that everyone gets."""

from dataclasses import replace

import numpy as np
import pytest

from jax_attn.bench.arrays import sampled_batch, sampled_cotangent, sampled_rows, seeded_arrays
from jax_attn.bench.presets import PRESETS, select
from jax_attn.bench.workload import DECODE, MODES, PREFILL, Workload

CORE = Workload("core", False, 1, 257, 263, 4, 2, 5, is_causal=True)
LAYER = Workload("layer", True, 2, 5, 5, 4, 1, 3, D=12)
STEP, PROMPT, CHUNK = (
    Workload("cached", False, 2, T, S, 6, 2, 5, is_causal=True, room=53)
    for T, S in ((1, 37), (23, 23), (7, 37))
)


def test_every_preset_has_workloads_and_no_name_stands_for_two():
    every = [w for preset in PRESETS.values() for w in preset]
    assert all(PRESETS.values())
    assert len({w.name for w in every}) == len(set(every))


def test_presets_that_share_a_workload_measure_it_once():
    found = select(("seeds", "targets"), "bfloat16")
    assert len(found) == len(set(found)) == 12
    assert {w.dtype for w in found} == {"bfloat16"}


def test_a_workload_can_be_asked_for_by_its_own_name_and_is_there_once():
    (one,) = select(("longest/32768", "longest/32768"))
    assert (one.name, one.T, one.is_causal) == ("longest/32768", 32768, False)
    assert select(("long/2048", "long")) == PRESETS["long"]


@pytest.mark.parametrize("preset", ["long", "longest"])
def test_each_length_is_measured_full_and_causal_one_after_the_other(preset):
    found = PRESETS[preset]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert all(f"{full.name}/causal" == causal.name for full, causal in pairs)
    assert all((full.is_causal, causal.is_causal) == (False, True) for full, causal in pairs)
    assert all(full.T == causal.T for full, causal in pairs)


@pytest.mark.parametrize("w", [STEP, PROMPT, CHUNK], ids=["step", "prompt", "chunk"])
def test_work_is_two_products_by_every_key_that_a_token_sees(w):
    seen = sum(w.filled + t + 1 for t in range(w.T))
    assert w.filled + w.T == w.S
    assert w.pairs == seen
    assert w.flops(*w.modes) == 2 * 2 * w.B * w.N * seen * w.H
    assert w.cached_bytes == 2 * 4 * w.B * w.S * w.K * w.H
    assert replace(w, dtype="bfloat16").cached_bytes == w.cached_bytes // 2


def test_a_workload_has_its_modes_and_no_others():
    assert [w.modes for w in (STEP, PROMPT, CHUNK)] == [(DECODE,), (PREFILL,), (PREFILL,)]
    assert replace(STEP, room=0).modes == MODES
    for preset in (DECODE, PREFILL):
        assert {w.modes for w in PRESETS[preset]} == {(preset,)}


def test_decode_has_what_its_targets_compare():
    named = {w.name: w for w in PRESETS[DECODE]}
    for B in (1, 8):
        heads, one = named[f"decode/{B}x8192"], named[f"decode/{B}x8192/mqa"]
        assert (heads.B, heads.S, heads.N, heads.K, heads.H) == (B, 8192, 16, 16, 64)
        assert replace(heads, name=one.name, K=1) == one
    little, much = named["decode/512of512"], named["decode/512of32768"]
    assert (little.S, little.room, much.room) == (512, 512, 32768)
    assert replace(little, name=much.name, room=much.room) == much


def test_arrays_are_the_same_for_everyone_and_others_for_another_seed():
    one, two, other = (seeded_arrays(LAYER, seed) for seed in (0, 0, 1))
    assert one.keys() == {"x", "cotangent"} | {
        f"{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")
    }
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)
    assert {a.dtype for a in one.values()} == {np.dtype("float32")}


def test_sampled_rows_hold_the_ends_and_the_cotangent_nothing_else():
    rows = sampled_rows(CORE)
    assert (rows[0], rows[-1], len(set(rows))) == (0, CORE.T - 1, 128)
    kept = sampled_cotangent(CORE, seeded_arrays(CORE)["cotangent"])
    assert np.array_equal(np.flatnonzero(kept.any(axis=(0, 2, 3))), rows)
    assert len(sampled_rows(LAYER)) == LAYER.T


def test_of_large_rows_of_a_batch_a_few_are_judged():
    large = replace(CORE, B=8, T=1024, S=1024, N=16, K=16, H=128)
    assert sampled_batch(CORE).tolist() == [0]
    assert sampled_batch(large).tolist() == [0, 4, 7]
    assert sampled_batch(replace(large, S=2**20)).tolist() == [0, 7]
    assert sampled_batch(replace(large, H=8)).tolist() == [*range(8)]


def test_longer_sequences_are_judged_on_fewer_rows():
    counts = [len(sampled_rows(replace(CORE, T=S, S=S))) for S in (1024, 8192, 2**20)]
    assert counts == [128, 122, 16]
