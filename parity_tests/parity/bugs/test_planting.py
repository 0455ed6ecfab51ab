"""How bugs are planted: what a run tells, whose errors are raised, and that nothing is written."""

import numpy as np
import pytest
import torch

from jax_attn.parity.bugs.bug import Bug, Site
from jax_attn.parity.bugs.planting import Planted, Watched, run_planted
from jax_attn.parity.bugs.tensors import with_tensors
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

X = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)


class Twice(torch.nn.Module):
    """Two layers, the first of which is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)

    def forward(self, x):
        x = self.first(self.first(x))
        if x.isnan().any():
            raise ValueError("not a number")
        return self.second(x)


@pytest.fixture
def reference():
    torch.manual_seed(0)
    return Reference(Twice(), None, Inputs.of((X,), np.dtype("float32")))


def planted(change, at=None):
    return Planted(("addmm",), lambda call: Bug("bug", "a bug", change), at)


def halved(call):
    return call.result() / 2


def test_a_bug_is_planted_at_every_call_of_a_site(reference):
    mode = planted(halved)
    assert run_planted(reference, mode) is not None
    assert (mode.count, mode.planted) == (3, 3)
    assert [*mode.effects] == [Site("first", 1), Site("second", 1)]
    assert [effect.moved for effect in mode.effects.values()] == [0.5, 0.5]


def test_a_bug_is_planted_at_one_site_alone(reference):
    mode = planted(halved, Site("second", 1))
    wrong, right = run_planted(reference, mode), reference.exact({})
    assert (mode.count, mode.planted) == (3, 1)
    np.testing.assert_array_equal(wrong.outputs["output"], right.outputs["output"] / 2)


def test_a_call_of_a_part_alone_has_the_paths_of_the_reference(reference):
    mode = planted(halved)
    run_planted(reference.called(lambda module, x: module.second(x)), mode)
    assert [*mode.effects] == [Site("second", 1)]


def test_a_module_beside_the_reference_has_sites_of_its_own(reference):
    others = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    mode = planted(halved)
    run_planted(reference.called(lambda module, x: others[0](x) + others[1](x)), mode)
    assert len(mode.effects) == 2


def test_an_error_of_the_reference_ends_only_the_run(reference):
    assert run_planted(reference, planted(lambda call: call.result() * torch.nan)) is None


def test_an_operator_that_refuses_its_arguments_ends_only_the_run(reference):
    assert run_planted(reference, planted(lambda call: call.with_args(*call.args[1:]))) is None


def test_an_error_of_a_change_is_raised(reference):
    with pytest.raises(ZeroDivisionError):
        run_planted(reference, planted(lambda call: 1 // 0))


def test_an_error_in_choosing_a_bug_is_raised(reference):
    with pytest.raises(ZeroDivisionError):
        run_planted(reference, Planted(("addmm",), lambda call: 1 // 0))


def test_a_change_that_writes_to_an_argument_is_an_error(reference):
    with pytest.raises(RuntimeError, match="addmm writes to an argument"):
        run_planted(reference, planted(lambda call: call.args[0].mul_(2)))


def test_a_change_of_a_parameter_is_given_a_copy(reference):
    before = reference.exact({}).outputs["output"]
    doubled = with_tensors(reference, {"second.weight": lambda x: x.mul_(2)})
    other = run_planted(doubled, Watched())
    assert not np.array_equal(other.outputs["output"], before)
    reference.expect_unwritten()
    np.testing.assert_array_equal(reference.exact({}).outputs["output"], before)
