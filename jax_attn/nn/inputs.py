"""The sequences that an attention module is called on, completed and checked."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn.attention import checks


def sequences(module: Any, **inputs: Any) -> list[jax.Array]:
    """query, key and, where named, value, checked; a missing one takes the array before it.

    module: its embed_dim, kdim and vdim count. Raises ArgumentError with every problem.
    """
    axes = {"query": ("T", "embed_dim"), "key": ("S", "kdim"), "value": ("S", "vdim")}
    sizes: dict[str, dict[str, int]] = {"B": {}, "T": {}, "S": {}}
    problems, previous = [], ""
    for name, x in inputs.items():
        length, features = axes[name]
        size, note = getattr(module, features), ""
        if x is None and previous:
            x = inputs[name] = inputs[previous]
            note = f" ({previous}, as none was given)"
        own_problems = checks.float_problems(name, x, 3, f"(B, {length}, {features})")
        problems += own_problems
        if not own_problems:
            sizes["B"][name], sizes[length][name] = x.shape[:2]
            if x.shape[1] == 0:
                problems.append(f"{name}: expected {length} ≥ 1, got {checks.summary(x)}")
            if x.shape[2] != size:
                got = f"got {checks.summary(x)}{note}"
                problems.append(f"{name}: expected {features} = {size} features, {got}")
        previous = name
    for axis in ("B", "S"):
        if len(set(sizes[axis].values())) > 1:
            problems.append(f"{', '.join(sizes[axis])}: expected one {axis}, got {sizes[axis]}")
    checks.raise_all(type(module).__name__, problems)
    return [jnp.asarray(x) for x in inputs.values()]
