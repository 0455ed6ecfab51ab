"""Run rows of the built-in matrix on a mesh of devices, of the size that `--mesh` gives."""

import math

import click

from jax_attn.cli.common import devices
from jax_attn.cli.common.selection import NONE_BY_DEFAULT, NONE_LEFT, expect_known, selected
from jax_attn.cli.verifying.matrix import Filters
from jax_attn.cli.verifying.outcome import Outcome

AXES = ("data", "heads")
Sizes = dict[str, int]
"""Axis of AXES → number of devices; 1 for an axis that `--mesh` does not name."""


def mesh_sizes(_: click.Context, option: click.Parameter, value: str | None) -> Sizes | None:
    """Parse `--mesh data=2,heads=4`, as a callback of click. Raises BadParameter."""
    if value is None:
        return None
    pairs = [part.strip().partition("=") for part in value.split(",")]
    wrong = [
        "=".join((name, size)) if mark else name
        for name, mark, size in pairs
        if name not in AXES or not (size.isascii() and size.isdigit() and int(size) > 0)
    ]
    names = [name for name, *_ in pairs]
    wrong += [f"{name} more than once" for name in AXES if names.count(name) > 1]
    if wrong:
        expected = "expected sizes from 1 up of data, heads or both, such as data=2,heads=4"
        raise click.BadParameter(f"{expected}, got {', '.join(wrong)}")
    return dict.fromkeys(AXES, 1) | {name: int(size) for name, _, size in pairs}


def verify_on_mesh(
    filters: Filters,
    backend: str,
    implementation: str | None,
    *,
    sizes: Sizes,
    every_row: bool,
    shown: bool,
) -> Outcome:
    """Judge the rows on meshes of Auto and of Explicit axes, with a progress bar on stderr."""
    from jax_attn.attention.dispatch import KERNELS
    from jax_attn.cli.common.progress import worked_off
    from jax_attn.selfcheck import process_pool
    from jax_attn.selfcheck.matrix import mesh_rows

    if implementation is not None:
        expect_known("--implementation", (implementation,), KERNELS)
    if problems := mesh_rows.problems(sizes):
        raise click.UsageError("\n".join(f"--mesh: {problem}" for problem in problems))
    kind = "cpu" if backend == "all" else backend
    devices.expect_devices(kind, math.prod(sizes.values()))
    chosen, all_of_them = (
        [
            mesh_rows.MeshCase(case, **sizes, kind=axes)
            for case in selected(mesh_rows.cases(every=every), *filters)
            for axes in mesh_rows.KINDS
        ]
        for every in (every_row, True)
    )
    left_out = len(all_of_them) - len(chosen)
    if not chosen:
        raise click.UsageError(NONE_BY_DEFAULT if left_out else NONE_LEFT)
    work = process_pool.mesh_tasks(chosen, kind, implementation)
    processes = None if kind == "cpu" else 1
    outcome = Outcome([row.name for row in chosen], shown, left_out)
    return outcome.collect(worked_off(work, processes))
