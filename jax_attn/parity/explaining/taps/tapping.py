"""Run a torch module in float64 and keep every floating-point tensor."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from jax_attn.parity.bugs.layers import NORMS
from jax_attn.parity.explaining.taps.tap import LEAVES, Place, Tap
from jax_attn.parity.run.modes.constants import Kwargs, tensors_of
from jax_attn.parity.run.modes.lines import calling_line
from jax_attn.parity.run.modes.mode import Mode
from jax_attn.parity.run.modes.module_calls import ModuleCalls

_COPIES = 5
"""Copies in memory per tensor: the run's own, its value, its spread, and two of a perturbed run."""

_FUSED = frozenset(
    """
    _fused_rms_norm _log_softmax _softmax _softmax_backward_data addmm baddbmm gelu gelu_backward
    native_batch_norm native_group_norm native_layer_norm native_layer_norm_backward silu
    silu_backward tanh_backward
    """.split()  # noqa: SIM905
)

Seen = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""The identity of a tensor: its storage, and its offset, shape and strides there."""


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


class Tapping(Mode):
    """Mixin for a mode of torch that records the results of each operation, and their parents.

    Tensors are identified by their storage. A view of a whole tensor is that tensor; a view of a
    part is a tap of its own. A port may be wrong in one step of a fused operation, so the steps are
    taps, too, and parents of its result.

    inside: the fused operation whose steps are being computed.
    """

    inside = ""

    def tap(
        self, names: Mapping[str, np.ndarray], places: Places | None, room: float = math.inf
    ) -> None:
        """Begin a recording.

        names: parameters by name. places: gives the place of each tap; None leaves it out. room:
        bytes of memory that may be used.
        """
        self._room = room
        self.taps: list[Tap] = []
        self._names, self._places = names, places
        self._nodes: dict[int, int] = {}
        self._views: dict[Seen, int] = {}
        self.tensors: list[torch.Tensor] = []  # if a tensor were freed, its storage could be reused

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        given = tensors_of((args, kwargs))
        parents = tuple(dict.fromkeys(map(self.node, given)))
        parents += tuple(self.steps_of(func, args, kwargs))
        result = super().dispatched(func, args, kwargs)
        results = tensors_of(result)
        if func.overloadpacket.__name__ in NORMS:
            results = [*results[1:], results[0]]  # the normalized one follows from its statistics
        for x in results:
            if func.is_view and x.numel() == given[0].numel():
                self._views[seen(x)] = self.node(given[0])
            else:
                index = self._add(x, f"aten.{func.overloadpacket.__name__}", "", parents)
                parents += (index,) if func.overloadpacket.__name__ in NORMS else ()
                if func.is_view:
                    self._views[seen(x)] = index
                else:
                    storage = x.untyped_storage()
                    self._nodes[storage.data_ptr()] = index
                    self._views.pop(seen(x), None)
                    if x.numel() * x.element_size() < storage.nbytes():
                        self._views[seen(x)] = index  # another part may be written to next
        return result

    def steps_of(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> range:
        """Compute an operation by its steps, if it is fused; return the indices of their taps."""
        first = len(self.taps)
        name, by_steps = func.overloadpacket.__name__, decomposition_table.get(func)
        if not self.inside and by_steps and name in _FUSED:
            self.inside = name
            with self:
                by_steps(*args, **kwargs)
            self.inside = ""
        return range(first, len(self.taps))

    def node(self, x: torch.Tensor) -> int:
        """Return the tap that a tensor is, or is a view of; an unknown tensor becomes a leaf."""
        known = self.known(x)
        if known is None:
            known = self._nodes[x.untyped_storage().data_ptr()] = self._leaf(x)
        return known

    def known(self, x: torch.Tensor) -> int | None:
        """Return the tap that a tensor is, or None if it is unknown."""
        return self._views.get(seen(x), self._nodes.get(x.untyped_storage().data_ptr()))

    def here(self) -> Place:
        """Return the place of the current operation, empty if places are not recorded."""
        return Place() if self._places is None else self._places.here()

    def _leaf(self, x: torch.Tensor) -> int:
        value = x.detach().numpy()
        for name, a in self._names.items():
            if a.shape == value.shape and np.array_equal(a, value):
                return self._add(x, "parameter", name, ())
        return self._add(x, "input", "", ())

    def _add(self, x: torch.Tensor, op: str, name: str, parents: tuple[int, ...]) -> int:
        self.tensors.append(x)
        place = Place(name) if op in LEAVES else self.here()
        # A port's taps are real, so a complex tensor is none of them.
        real = x.detach() if not x.is_complex() else torch.full(x.shape, math.nan)
        value = real.numpy().astype(np.float64, copy=True)
        self._room -= _COPIES * value.nbytes
        if self._room < 0:
            raise ValueError(
                "inputs: expected a model whose tensors fit into half of the free memory, "
                f"{_COPIES} times over; explain one with fewer layers, or fewer tokens"
            )
        op = op.replace("aten.", f"aten.{self.inside}: ") if self.inside else op
        self.taps.append(Tap(len(self.taps), op, place, value, parents, bool(self.inside)))
        return len(self.taps) - 1


def seen(x: torch.Tensor) -> Seen:
    """Return the identity of a tensor."""
    at = x.untyped_storage().data_ptr(), int(x.storage_offset())
    return *at, tuple(x.shape), tuple(x.stride())
