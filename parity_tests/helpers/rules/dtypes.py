"""Compare the dtypes and shapes of results, of calls as they are and with bfloat16 for float32."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from helpers.rules.call import Call, attempted, mapped, miscounted, tensors
from helpers.rules.operators import in_jax, operator
from jax_attn.translate.rules.expression import DTYPES

# What torch says where an operator takes no bfloat16, or not beside the dtypes of other tensors.
NO_BFLOAT16 = re.compile(
    "BFloat16|[Ll]ow precision|[Ee]xpected .*dtype|same dtype|must have the same|but got"
    "|[Uu]nsupported d?type|must be either float or double"
)


@dataclass
class _Typed:
    """A call whose types alone are compared."""

    call: Call
    theirs: list[torch.Tensor]
    run: Callable[..., tuple[Any, ...]]
    arrays: dict[str, np.ndarray]
    text: str
    error: Exception | None = None

    def judged(self, got: Any) -> list[str]:
        """Return where the number, the shapes or the dtypes of results differ."""
        if self.error is not None:
            return [f"raises {self.error!r} in `{self.text}`"]
        if problem := miscounted(self.call, got, self.theirs):
            return [f"`{self.text}` {problem}"]
        compared = self.theirs[: self.call.outputs]
        # An int64 of torch is an int32.
        expected = [(tuple(each.shape), DTYPES[each.dtype], False) for each in compared]
        types = [(each.shape, str(each.dtype), each.weak_type) for each in got[: len(compared)]]
        if expected == types:
            return []
        return [f"`{self.text}` is of shape, dtype, weak type {types}, not {expected}"]


def _typed(call: Call, change: Any) -> _Typed:
    args = [mapped(each, change) for each in call.args]
    kwargs = {key: mapped(each, change) for key, each in call.kwargs.items()}
    out = operator(call.name)(*args, **kwargs)
    return _Typed(call, tensors(out), *in_jax(call.rule, call.name, args, kwargs, out))


def _narrowed(each: Any) -> Any:
    is_float = isinstance(each, torch.Tensor) and each.dtype == torch.float32
    return each.detach().bfloat16() if is_float else each


def types_differ(calls: Sequence[Call]) -> list[list[str]]:
    """Return where types differ, of each call as it is and with bfloat16 for float32."""
    found: list[list[str]] = [[] for _ in calls]
    typed: list[tuple[int, _Typed]] = []
    for place, call in enumerate(calls):
        try:
            typed.append((place, _typed(call, lambda each: each)))
        except Exception as error:
            found[place].append(f"raises {error!r}")
            continue
        if any(each.dtype == torch.float32 for each in call.tensors):
            try:
                typed.append((place, _typed(call, _narrowed)))
            except RuntimeError as error:
                if not NO_BFLOAT16.search(str(error)):
                    found[place].append(f"raises {error!r} in bfloat16")

    def together(every: list[Any]) -> list[Any]:
        return [
            attempted(each, each.run, arrays)
            for (_, each), arrays in zip(typed, every, strict=True)
        ]

    types = jax.eval_shape(together, [each.arrays for _, each in typed])
    for (place, each), got in zip(typed, types, strict=True):
        found[place] += each.judged(got)
    return found
