"""Judge the rows of `jax-attn verify --all` on CPU that `jax-attn verify` leaves out.

The gate runs `jax-attn verify` as README has it, and then these, so that no row is judged twice.
"""

import sys

from jax_attn.selfcheck.matrix import rows
from jax_attn.selfcheck.matrix.cases import Case


def left_out() -> tuple[list[Case], list[Case]]:
    """Return the rows that are measured, and those that are emulated."""
    measured, emulated = {*rows.default()}, {*rows.emulated_by_default()}
    return (
        [case for case in rows.matrix() if case not in measured],
        [case for case in rows.emulated() if case not in emulated],
    )


def main() -> int:
    from jax_attn.cli.common.progress import worked_off
    from jax_attn.cli.verifying.outcome import Outcome
    from jax_attn.selfcheck import process_pool

    measured, emulated = left_out()
    work = process_pool.tasks(measured, "cpu") + process_pool.tasks(emulated, "tpu")
    outcome = Outcome([case.name for case in (*measured, *emulated)], shown=True)
    outcome.collect(worked_off(work))
    return outcome.present(report=None, as_json=False, all_tensors=False)


if __name__ == "__main__":
    sys.exit(main())
