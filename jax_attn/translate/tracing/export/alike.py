"""Find out if a module runs the same operators in both modes, in far less than an export takes."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from jax_attn.parity.run.modes.mode import Mode
from jax_attn.translate.tracing.export.marks import with_leaves


class _OtherError(Exception):
    """Stop the second run where it does something that the first did not."""


class _Recorded(Mode):
    """Record what runs, each operator with what it reads; or compare it with a record.

    An operator that was not recorded is not run, so it neither draws nor writes.
    """

    def __init__(self, first: "_Recorded | None" = None) -> None:
        super().__init__()
        self.first = first
        self.steps: list[Any] = []
        self.made = WeakIdKeyDictionary()
        # Kept, so that no tensor of the second run has the identity of one of the first.
        self.found: dict[int, torch.Tensor] = {}

    def named(self, tree: Any) -> str:
        """Write a tree with each tensor as the place that made it, or as itself if none did."""

        def name(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf in self.made:
                return self.made[leaf]
            self.found[id(leaf)] = leaf
            return id(leaf)

        return repr(with_leaves(tree, name))

    def step(self, *what: Any) -> None:
        self.steps.append(what)
        place = len(self.steps) - 1
        if self.first is not None and self.first.steps[place : place + 1] != [what]:
            raise _OtherError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.step(func, self.named((args, kwargs)))
        result = func(*args, **kwargs)
        for index, each in enumerate(torch.utils._pytree.tree_leaves(result)):
            if isinstance(each, torch.Tensor) and each not in self.made:
                self.made[each] = f"{len(self.steps)}.{index}"
        return result


def alike(reference: torch.nn.Module, call: Callable[[], Any]) -> bool:
    """Return whether a call of a module does the same in training mode as in eval mode.

    The modes of the modules are not put back.
    """
    run, before = None, drawn()
    try:
        for is_training in (False, True):
            reference.train(is_training)
            with torch.no_grad(), _Recorded(run) as run:
                run.step(run.named(call()))
    except Exception:  # what the module raises in training mode, its export tells
        return False
    return drawn() == before


def drawn() -> tuple[Any, ...]:
    """Return what changes when Python or NumPy draws a random number."""
    of_numpy: Any = np.random.get_state(legacy=True)
    return (random.getstate(), of_numpy[1].tobytes(), *of_numpy[2:])
