"""No mode of a check brings torch's compiler in: that takes as long as a small check."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from jax_attn.parity.run.modes.constants import Recorder
from jax_attn.parity.run.modes.decisions import DecisionRecorder
from jax_attn.parity.run.modes.perturbed_mode import Perturbed


class Ordinary(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Recorder, DecisionRecorder, Perturbed])
def test_a_mode_runs_without_what_keeps_the_compiler_out(mode):
    assert not hasattr(mode.__torch_dispatch__, "__wrapped__")
    assert hasattr(Ordinary.__torch_dispatch__, "__wrapped__")
