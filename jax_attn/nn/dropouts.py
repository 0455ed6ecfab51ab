"""The two dropouts of an attention module: of the weights, and of the output."""

from typing import Any

from flax import nnx

from jax_attn.attention import Dropout, checks
from jax_attn.attention.annotations import AnyArray


def dropouts(
    module: Any,
    shape_BTD: tuple[int, ...],
    deterministic: bool | None,
    rngs: nnx.Rngs | nnx.RngStream | None,
    keep: AnyArray | None,
    out_keep: AnyArray | None,
) -> tuple[Dropout | None, Dropout | None]:
    """Dropout for the weights and for the output, None where there is none.

    module: its rates count, and its deterministic and rngs where the call gives none. shape_BTD:
    the output's. The others are the call's own. Raises ArgumentError with every problem.
    """
    deterministic = module.deterministic if deterministic is None else deterministic
    rngs = module.rngs if rngs is None else rngs
    stream, where = _stream(rngs), type(module).__name__
    if not isinstance(deterministic, bool):
        got = checks.summary(deterministic)
        checks.raise_all(where, [f"deterministic: expected a static Python bool, got {got}"])
    problems: list[str] = []
    drops: list[Dropout | None] = []
    for rate_name, keep_name, kept in (
        ("dropout_rate", "keep", keep),
        ("out_dropout_rate", "out_keep", out_keep),
    ):
        rate = getattr(module, rate_name)
        drop = None
        if kept is not None and (deterministic or rate == 0):
            why = "deterministic is True" if deterministic else f"{rate_name} is 0"
            problems.append(f"{keep_name}: expected None, as {why}: nothing would be dropped")
        elif kept is not None:
            drop = Dropout(rate, keep=kept)
        elif deterministic or rate == 0:
            pass
        elif stream is not None:
            drop = Dropout(rate, key=stream())
        else:
            problems.append(
                f"rngs: {rate_name} is {rate} and the module is in training mode; expected "
                f'rngs=nnx.Rngs(dropout=…) with a "dropout" stream here or in the constructor, or '
                f"{keep_name}=, deterministic=True or eval(); got {type(rngs).__name__}"
            )
        drops.append(drop)
    dropout, out_dropout = drops
    if out_keep is not None and out_dropout is not None:
        problems += checks.broadcast_problems("out_keep", out_keep, shape_BTD, "(B, T, D)")
    checks.raise_all(where, problems)
    return dropout, out_dropout


def _stream(rngs: object) -> nnx.RngStream | None:
    """The stream that dropout draws from; None where there is none."""
    if isinstance(rngs, nnx.Rngs) and ("dropout" in rngs or "default" in rngs):
        rngs = rngs.dropout
    return rngs if isinstance(rngs, nnx.RngStream) else None
