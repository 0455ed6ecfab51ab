"""Find where an operation of a torch module runs or, backward, which one it differentiates."""

from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from jax_attn.parity.explaining.taps.tap import Place
from jax_attn.parity.run.modes.lines import calling_line


class Places:
    """A context in which the place of each operation is known.

    The path of a module begins at the outermost module that is called.
    """

    def __init__(self) -> None:
        self._names: dict[torch.nn.Module, str] = {}
        self._inside: list[torch.nn.Module] = []
        self._of_nodes: dict[int, Place] = {}

    def __enter__(self) -> "Places":
        self._hooks = (
            register_module_forward_pre_hook(lambda part, _: self._entered(part)),
            register_module_forward_hook(lambda *_: self._left(), always_call=True),
        )
        return self

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def here(self) -> Place:
        """Return the place of the current operation."""
        if torch._C._current_graph_task_id() == -1:
            module = self._names[self._inside[-1]] if self._inside else ""
            place = Place(module, calling_line())
            # The node of its derivative already exists, with the last sequence number.
            self._of_nodes[torch.autograd._get_sequence_nr() - 1] = place
            return place
        node = torch._C._current_autograd_node()
        forward = Place() if node is None else self._of_nodes.get(node._sequence_nr(), Place())
        return forward._replace(is_backward=True)

    def _entered(self, part: torch.nn.Module) -> None:
        if part not in self._names:
            self._names |= {inner: name for name, inner in part.named_modules()}
        self._inside.append(part)

    def _left(self) -> None:
        self._inside.pop()
