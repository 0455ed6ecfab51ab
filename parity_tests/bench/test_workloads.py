"""The bench's presets, and the arrays that everyone gets."""

from dataclasses import replace

import numpy as np
import pytest

from jax_attn.bench.arrays import sampled_cotangent, sampled_rows, seeded_arrays
from jax_attn.bench.presets import PRESETS, select
from jax_attn.bench.workload import Workload

CORE = Workload("core", False, 1, 257, 263, 4, 2, 5, is_causal=True)
LAYER = Workload("layer", True, 2, 5, 5, 4, 1, 3, D=12)


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


def test_longer_sequences_are_judged_on_fewer_rows():
    counts = [len(sampled_rows(replace(CORE, T=S, S=S))) for S in (1024, 8192, 2**20)]
    assert counts == [128, 122, 16]
