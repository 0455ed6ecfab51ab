"""Under random sets of names, no row that `infer` decides is wrong, and it decides many."""

import pytest
import torch

from helpers.transfer.renamed_models import abstract, as_published, renamed, written, wrong_paths
from jax_attn.transfer import infer
from jax_attn.transfer.proposal import infer as proposal
from jax_attn.transfer.proposal import matching

SIZES = ("distinct", "square")
SEEDS = range(40)  # for each


@pytest.fixture(scope="module")
def flax_modules():
    return {
        (sizes, norm): abstract(sizes=sizes, embed_norm=norm)
        for sizes in SIZES
        for norm in (True, False)
    }


def judged(flax_modules, sizes, seeds):
    """Of each seed the paths written wrong; how many were written, and could have been."""
    wrong, count, of = {}, 0, 0
    for seed in seeds:
        torch.manual_seed(seed)
        module, table = renamed(seed, sizes)
        tensors, flax_module = module.state_dict(), flax_modules[sizes, seed % 3 != 0]
        layout = infer(tensors if seed % 2 else module, flax_module).layout
        ours, true = (written(t, tensors, flax_module) for t in (layout, table))
        if paths := wrong_paths(ours, true):
            wrong[seed] = paths
        count, of = count + len(ours), of + len(true)
    return wrong, count, of


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_no_row_is_wrong_under_any_names(flax_modules, sizes, request):
    seeds = range(1000) if request.config.getoption("--long") else SEEDS
    wrong, count, of = judged(flax_modules, sizes, seeds)
    assert wrong == {}
    assert count > 0.25 * of  # to decide nothing would be no feat


def greedy(possible):
    """The closest of the pairs that are left, again and again."""
    settled, gone = [], set()
    for pair in sorted(possible, key=lambda pair: pair.bond):
        if gone.isdisjoint((pair.torch, pair.flax)):
            settled.append(pair)
            gone |= {pair.torch, pair.flax}
    return settled


def by_name_alone(possible):
    """Names of one kind, unique or not."""
    return greedy([pair for pair in possible if pair.bond < matching.Bond.NONE])


@pytest.mark.slow
@pytest.mark.parametrize("guess", [greedy, by_name_alone])
def test_a_matcher_that_guesses_is_seen(flax_modules, guess, monkeypatch):
    monkeypatch.setattr(proposal, "settled_pairs", guess)
    wrong, *_ = judged(flax_modules, "square", range(20))
    assert wrong


def test_under_its_first_names_everything_is_decided(flax_modules):
    module, table = as_published()
    flax_module, tensors = flax_modules["distinct", True], module.state_dict()
    found = infer(module, flax_module)
    assert (found.undecided, found.left) == ((), {})
    ours, true = (written(t, tensors, flax_module) for t in (found.layout, table))
    assert wrong_paths(ours, true) == []
    assert len(ours) == len(tensors)
