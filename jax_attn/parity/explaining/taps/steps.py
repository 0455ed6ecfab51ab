"""Record the steps inside torch's fused operations, since a port may be wrong in one of them."""

from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from jax_attn.parity.explaining.taps.tapping import Tapping
from jax_attn.parity.run.modes.constants import Kwargs

_FUSED = frozenset(
    """
    _fused_rms_norm _log_softmax _softmax _softmax_backward_data addmm baddbmm gelu gelu_backward
    native_batch_norm native_group_norm native_layer_norm native_layer_norm_backward silu
    silu_backward tanh_backward
    """.split()  # noqa: SIM905
)


class Stepped(Tapping, TorchDispatchMode):
    """A tapped run in which the steps of fused operations are taps, too.

    The result of such an operation is a tap of its own, with its steps as parents.
    """

    def steps_of(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> range:
        """Compute an operation by its steps; return the indices of their taps."""
        first = len(self.taps)
        name, by_steps = func.overloadpacket.__name__, decomposition_table.get(func)
        if not self.inside and by_steps and name in _FUSED:
            self.inside = name
            with self:
                by_steps(*args, **kwargs)
            self.inside = ""
        return range(first, len(self.taps))
