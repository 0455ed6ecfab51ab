"""The sequences that an attention module is called on: filled in where not given, and checked."""

import jax
import jax.numpy as jnp

from jax_attn.attention import checks


def sequences(module, **inputs) -> list[jax.Array]:
    """query, key and maybe value: the ones not given (None) are those before them; all checked.

    module: whose embed_dim, kdim and vdim count. Raises ArgumentError with every problem.
    """
    axes = {"query": ("T", "embed_dim"), "key": ("S", "kdim"), "value": ("S", "vdim")}
    problems, sizes, given = [], {"B": {}, "S": {}}, None
    for name, x in inputs.items():
        length, features = axes[name]
        size = getattr(module, features)
        note = "" if x is not None or given is None else f" ({given}, as none was given)"
        x = inputs[name] = inputs[given] if x is None and given is not None else x
        found = checks.float_problems(name, x, 3, f"(B, {length}, {features})")
        problems += found
        if not found:
            sizes["B"][name] = x.shape[0]
            sizes.setdefault(length, {})[name] = x.shape[1]
            if x.shape[1] == 0:
                problems.append(f"{name}: expected {length} ≥ 1, got {checks.summary(x)}")
            if x.shape[2] != size:
                got = f"got {checks.summary(x)}{note}"
                problems.append(f"{name}: expected {features} = {size} features, {got}")
        given = name
    for axis in ("B", "S"):
        if len(set(sizes[axis].values())) > 1:
            problems.append(f"{', '.join(sizes[axis])}: expected one {axis}, got {sizes[axis]}")
    checks.raise_all(type(module).__name__, problems)
    return [jnp.asarray(x) for x in inputs.values()]
