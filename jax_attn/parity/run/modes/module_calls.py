"""Track which module of a reference is running."""

from collections import Counter
from threading import get_ident
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleCalls:
    """A context that knows which modules' calls are running, in the thread that entered it.

    torch calls the hooks of a module in every thread; other threads run other copies.
    """

    def __init__(self, root: torch.nn.Module | None = None):
        """root: the module from which paths begin. Without it, they begin at the outermost module
        that is called."""
        self._running: list[tuple[torch.nn.Module | None, Counter[str]]] = [(None, Counter())]
        self._names: dict[torch.nn.Module, str] = {}
        self._beside = 0
        self.name_from(root)

    def __enter__(self) -> Self:
        self._thread = get_ident()
        self._hooks = (
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        )
        return self

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def name_from(self, root: torch.nn.Module | None) -> None:
        """Let paths begin at a module."""
        if root is not None:
            self._names = {module: name for name, module in root.named_modules()}

    @property
    def module(self) -> torch.nn.Module | None:
        """The innermost module that is running; None outside all modules."""
        return self._running[-1][0]

    @property
    def path(self) -> str | None:
        """The path of that module, "" for the root; None outside all modules."""
        return None if self.module is None else self._names[self.module]

    @property
    def named(self) -> str:
        """The path of the innermost running module that has one; "" if only the root is running."""
        paths = (self._names[module] for module, _ in reversed(self._running) if module)
        return next(filter(None, paths), "")

    def count(self, kind: str) -> int:
        """Count an operator of a kind in the current call of the module; return its number."""
        met = self._running[-1][1]
        met[kind] += 1
        return met[kind]

    def _entered(self, module: torch.nn.Module, _: Any) -> None:
        if get_ident() != self._thread:
            return
        if module not in self._names:  # a call may use modules that are not the reference's
            self._beside += bool(self._names)
            prefix = f"{type(module).__name__}:{self._beside}" if self._beside else ""
            self._names |= {part: name for name, part in module.named_modules(prefix=prefix)}
        self._running.append((module, Counter()))

    def _left(self, *_: Any) -> None:
        if get_ident() == self._thread:
            self._running.pop()
