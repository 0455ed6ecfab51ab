"""What can be said of a TPU on a host without one: emulated rows, compiled designs.

Neither is parity on a TPU. An emulated row is the port's program with its products rounded as
the TPU's matrix unit rounds them, judged like any other at the budget of that rounding. A
compiled design was accepted by the TPU's own compiler, or, without libtpu, lowered for every
platform; nothing was run, so it has no verdict.
"""

from collections.abc import Iterator
from typing import Any

import jax

from jax_attn.parity.cases import EMULATED_SHAPE, Case
from jax_attn.parity.compiled import compile_for_tpu, lower_everywhere, why_no_tpu_compiler
from jax_attn.parity.designs import DESIGNS
from jax_attn.parity.matrix import Row, judge_row, several_tiles
from jax_attn.parity.result import Result
from jax_attn.parity.run_jax import forward_and_gradients


def run_emulated(case: Case, implementation: str | None = None) -> Result:
    """The verdict on one emulated row."""
    with jax.default_device(jax.devices("cpu")[0]), several_tiles():
        row = Row(DESIGNS[case.design], case, precision="mxu", implementation=implementation)
        return judge_row(row, case, backend="tpu", level="emulated")


def compile_design(name: str) -> Iterator[dict[str, Any]]:
    """Forward and gradient of a design through the TPU compiler, or lowered for all platforms."""
    row = Row(DESIGNS[name], Case(name, "float32", "none", EMULATED_SHAPE, ""))
    forward, *args = row.bound.bind()
    shapes = jax.eval_shape(forward, *args)

    def gradient(*args: Any) -> Any:
        return forward_and_gradients(forward, *args)

    for direction, fn, given in (
        ("forward", forward, args),
        ("gradient", gradient, (*args, shapes)),
    ):
        identity = {
            "design": name,
            "direction": direction,
            "dtype": "float32",
            "shape": EMULATED_SHAPE,
        }
        if why_no_tpu_compiler() is None:
            yield identity | {"level": "compiled"} | compile_for_tpu(fn, *given)
        else:
            yield from (
                identity
                | {"level": "failed" if found["error"] else "lowered", "target": platform}
                | found
                for platform, found in lower_everywhere(fn, *given).items()
            )
