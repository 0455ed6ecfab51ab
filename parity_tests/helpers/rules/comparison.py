"""Say where rules of the translator and torch's operators differ: results, gradients, dtypes.

Calls are traced and compiled together: a program of its own for each would take most of the time.
"""

from collections.abc import Sequence

import torch

from helpers.rules.call import Call
from helpers.rules.dtypes import types_differ
from helpers.rules.operators import in_jax, operator
from helpers.rules.values import values_differ

LOW_PRECISION = (torch.float16, torch.bfloat16)


def differences(calls: Sequence[Call]) -> list[list[str]]:
    """Return, for each call, every difference from torch; or, in one line, what it raises."""
    found = types_differ(calls)
    # Of low precision, dtypes only are compared, for roundings differ.
    wide = [
        place
        for place, call in enumerate(calls)
        if not found[place] and all(each.dtype not in LOW_PRECISION for each in call.tensors)
    ]
    for place, more in zip(wide, values_differ([calls[place] for place in wide]), strict=True):
        found[place] += more
    return found


def text_of(call: Call) -> str:
    """Return what the rule writes for a call, with its tensors as x0, x1, ..."""
    out = operator(call.name)(*call.args, **call.kwargs)
    return in_jax(call.rule, call.name, call.args, call.kwargs, out)[2]
