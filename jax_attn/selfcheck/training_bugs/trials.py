"""Try the bugs outside attention, each in the case designed to detect it."""

from collections.abc import Sequence

from jax_attn.parity.judge.result import Result
from jax_attn.selfcheck.power.kill_report import Kill
from jax_attn.selfcheck.training_bugs.cases import TRAINING_CASES, judge_case
from jax_attn.selfcheck.training_bugs.encoder import ENCODER_BUGS, judge_encoder
from jax_attn.selfcheck.training_bugs.optimizer_bugs import OPTIMIZER_BUGS

CASES_OF_BUGS = {name: f"encoder/{bug.case}" for name, bug in ENCODER_BUGS.items()}
CASES_OF_BUGS |= {name: f"training/{bug.case}" for name, bug in OPTIMIZER_BUGS.items()}
"""bug -> the case designed to detect it."""


def selected(dtypes: Sequence[str], pattern: str) -> list[str]:
    """List the bugs with the pattern in their case's name, and in `dtypes` if any are given."""
    own = {name: TRAINING_CASES[bug.case].dtype for name, bug in OPTIMIZER_BUGS.items()}
    return [
        name
        for name, case in CASES_OF_BUGS.items()
        if pattern in case and (not dtypes or own.get(name, "float32") in dtypes)
    ]


def kills(names: Sequence[str]) -> list[Kill]:
    """Try each of these bugs."""
    return [Kill.of_result(name, CASES_OF_BUGS[name], _judged(name)) for name in names]


def _judged(name: str) -> Result:
    if name in ENCODER_BUGS:
        return judge_encoder(ENCODER_BUGS[name].case, ENCODER_BUGS[name])
    bug = OPTIMIZER_BUGS[name]
    return judge_case(bug.case, bug.make())
