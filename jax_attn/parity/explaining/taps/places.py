"""Find where an operation of a torch module runs or, backward, which one it differentiates."""

import torch

from jax_attn.parity.explaining.taps.tap import Place
from jax_attn.parity.run.modes.lines import calling_line
from jax_attn.parity.run.modes.module_calls import ModuleCalls


class Places(ModuleCalls):
    """A context in which the place of each operation is known."""

    def __init__(self) -> None:
        super().__init__()
        self._of_nodes: dict[int, Place] = {}

    def here(self) -> Place:
        """Return the place of the current operation."""
        if torch._C._current_graph_task_id() == -1:
            place = Place(self.path or "", calling_line())
            # The node of its derivative already exists, with the last sequence number.
            self._of_nodes[torch.autograd._get_sequence_nr() - 1] = place
            return place
        node = torch._C._current_autograd_node()
        forward = Place() if node is None else self._of_nodes.get(node._sequence_nr(), Place())
        return forward._replace(is_backward=True)
