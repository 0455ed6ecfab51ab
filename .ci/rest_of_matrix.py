"""Judge the rows of `jax-attn verify --all` on CPU that `jax-attn verify` leaves out.

    python .ci/rest_of_matrix.py            # all of them
    python .ci/rest_of_matrix.py 1257       # a third: which one depends on the number

The gate runs `jax-attn verify` as README has it, and then a third of these rows, so that no row is
judged twice. It gives the number of commits, so that one commit always has the same rows and three
commits in a row have all of them.
"""

import sys

from jax_attn.selfcheck.matrix import rows
from jax_attn.selfcheck.matrix.cases import Case

PARTS = 3


def left_out(number: int | None = None) -> tuple[list[Case], list[Case]]:
    """Return the rows that are measured, and those that are emulated; of a number, a third.

    Rows of one preparation are in one part, since they share the reference's side.
    """
    return (
        _part(rows.matrix(), {*rows.default()}, number),
        _part(rows.emulated(), {*rows.emulated_by_default()}, number),
    )


def _part(every: tuple[Case, ...], judged: set[Case], number: int | None) -> list[Case]:
    cases = [case for case in every if case not in judged]
    if number is None:
        return cases
    place = {each: n for n, each in enumerate(dict.fromkeys(c.preparation for c in cases))}
    return [case for case in cases if (place[case.preparation] - number) % PARTS == 0]


def main() -> int:
    from jax_attn.cli.common.progress import worked_off
    from jax_attn.cli.verifying.outcome import Outcome
    from jax_attn.selfcheck import process_pool

    measured, emulated = left_out(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    work = process_pool.tasks(measured, "cpu") + process_pool.tasks(emulated, "tpu")
    outcome = Outcome([case.name for case in (*measured, *emulated)], shown=True)
    outcome.collect(worked_off(work))
    return outcome.present(report=None, as_json=False, all_tensors=False)


if __name__ == "__main__":
    sys.exit(main())
