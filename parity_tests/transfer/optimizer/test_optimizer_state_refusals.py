"""What loading an optimizer's state refuses of torch's side, and how it says so."""

import pytest
import torch

from helpers.transfer.optimizer_runs import LAYOUT, load
from helpers.transfer.optimizer_states import (
    ADAM,
    ADAM_STATE,
    NAMES,
    SGD,
    SGD_STATE,
    WEIGHTS,
    having,
    keeping,
    stepped,
)
from helpers.transfer.small_model import problems_of

KEY, OTHER = NAMES[0], NAMES[1]
SHAPE = WEIGHTS[KEY].shape
AVG = torch.ones(SHAPE)
NO_STATE = ADAM | {"state": {i: kept for i, kept in ADAM["state"].items() if i}}
IN_TWO = ADAM | {
    "param_groups": [
        ADAM["param_groups"][0] | {"params": ids} for ids in ([0, 1, 2], [3, 4, 5, 6, 7])
    ]
}


def refused(torch_state, says, *problems, **options):
    """A state dict and other arguments, what their error says, and (kind, name) of each problem."""
    return torch_state, options, [*problems], says


REFUSED = {
    "no state yet": refused(
        ADAM | {"state": {}},
        "torch has it for 0 parameters, optax has 8 arrays of mu",
        ("missing", "exp_avg"),
        ("missing", "exp_avg_sq"),
        ("missing", "step"),
    ),
    "no state for one parameter": refused(
        NO_STATE,
        "torch keeps nothing for a parameter that had no gradient yet",
        ("missing", f"exp_avg of {KEY}"),
        ("missing", f"exp_avg_sq of {KEY}"),
    ),
    "one moment of one parameter": refused(
        keeping({"exp_avg_sq": None}), f'row("{KEY}"', ("missing", f"exp_avg_sq of {KEY}")
    ),
    "no momentum yet for one parameter": refused(
        keeping({"momentum_buffer": None}, here=SGD),
        "had no gradient yet",
        ("missing", f"momentum_buffer of {KEY}"),
    ),
    "a state of no parameter": refused(
        keeping({}, of=8), "expected an id of the param_groups", ("unexpected", "state[8]")
    ),
    "no step beside the moments": refused(
        keeping({"step": None}), "got only exp_avg, exp_avg_sq", ("missing", f"step of {KEY}")
    ),
    "steps that differ": refused(
        keeping({"step": torch.tensor(2.0)}, of=1),
        f"got 1 ({KEY}), 2 ({OTHER})",
        ("ambiguous", "step"),
    ),
    "half a step": refused(
        keeping({"step": torch.tensor(0.5)}),
        "a whole number below 2³¹, got 0.5",
        ("unreadable", f"step of {KEY}"),
    ),
    "a step that is no number": refused(
        keeping({"step": torch.tensor(torch.nan)}), "got nan", ("unreadable", f"step of {KEY}")
    ),
    "more steps than optax counts": refused(
        keeping({"step": torch.tensor(2.0**31)}), "below 2³¹", ("unreadable", f"step of {KEY}")
    ),
    "another step said": refused(ADAM, f"got 1 ({KEY}), 2 (step=)", ("ambiguous", "step"), step=2),
    "wrong shape": refused(
        keeping({"exp_avg": AVG.T}), f"got {[*SHAPE[::-1]]}", ("wrong shape", f"exp_avg of {KEY}")
    ),
    "wrong dtype": refused(
        keeping({"exp_avg": AVG.double()}), "got float64", ("wrong dtype", f"exp_avg of {KEY}")
    ),
    "sparse": refused(
        keeping({"exp_avg": AVG.to_sparse()}), ".to_dense()", ("unreadable", f"exp_avg of {KEY}")
    ),
    "a list for a moment": refused(
        keeping({"exp_avg": [1.0]}), "got list", ("unreadable", f"exp_avg of {KEY}")
    ),
    "amsgrad": refused(
        stepped(torch.optim.Adam, amsgrad=True),
        "the largest of the uncorrected second moments",
        ("refused", "param_groups[0].amsgrad"),
        ("unexpected", "max_exp_avg_sq"),
    ),
    "maximize": refused(
        having(ADAM, maximize=True), "negated gradients", ("refused", "param_groups[0].maximize")
    ),
    "dampening": refused(
        having(SGD, dampening=0.1),
        "adds each gradient whole",
        ("refused", "param_groups[0].dampening"),
    ),
    "another algorithm of torch": refused(
        stepped(torch.optim.RMSprop),
        "expected options of Adam, AdamW or SGD, got lr, ",
        ("refused", "param_groups[0]"),
        ("unexpected", "step"),
        ("unexpected", "square_avg"),
        ("missing", "exp_avg"),
        ("missing", "exp_avg_sq"),
        ("missing", "step"),
    ),
    "one group, no names": refused(
        ADAM, "the state dict has no param_names", ("missing", "names"), names=None
    ),
    "too few names": refused(
        ADAM, "expected [8] by group, got [7]", ("missing", "names"), names=NAMES[:-1]
    ),
    "a name twice": refused(
        ADAM, f"['{KEY}'] several times", ("ambiguous", "names"), names=[*NAMES[:-1], KEY]
    ),
    "one list of names for two groups": refused(
        IN_TWO, "expected a list of names for each of the 2 groups", ("ambiguous", "names")
    ),
    "names in another order than the groups'": refused(
        IN_TWO,
        "expected [3, 5] by group, got [5, 3]",
        ("missing", "names"),
        names=[NAMES[:5], NAMES[5:]],
    ),
    "names that are not the optimizer's own": refused(
        having(ADAM, param_names=NAMES[::-1]),
        "param_groups[0] names its parameters",
        ("ambiguous", "names"),
    ),
    "a key that the table lacks": refused(
        ADAM,
        "no row takes it",
        *[
            (kind, f"{moment} of {key}")
            for moment in ("exp_avg", "exp_avg_sq")
            for kind, key in (("missing", KEY), ("unexpected", "rotary.weight"))
        ],
        names=["rotary.weight", *NAMES[1:]],
    ),
    "several at once": refused(
        having(keeping({"exp_avg": AVG.T, "exp_avg_sq": None}), maximize=True),
        "3 problems",
        ("refused", "param_groups[0].maximize"),
        ("wrong shape", f"exp_avg of {KEY}"),
        ("missing", f"exp_avg_sq of {KEY}"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_loaded_is_named_in_full(case):
    torch_state, options, expected, says = REFUSED[case]
    opt_state = SGD_STATE if "dampening" in torch_state["param_groups"][0] else ADAM_STATE
    options = {"names": NAMES} | options
    found, message = problems_of(lambda: load(opt_state, torch_state, LAYOUT, **options))
    assert found == expected
    assert says in message


def test_what_those_rows_change_is_all_that_stops_them():
    load(ADAM_STATE, ADAM, LAYOUT, NAMES)
    load(ADAM_STATE, IN_TWO, LAYOUT, [NAMES[:3], NAMES[3:]], step=1)
    load(SGD_STATE, SGD, LAYOUT, NAMES)


WRONG_KINDS = {
    "the optimizer itself": (
        {"torch_state": torch.optim.SGD([torch.ones(1)])},
        TypeError,
        r"torch_state: .*SGD: pass its state_dict\(\)",
    ),
    "a name of a table": ({"layout": "gqa"}, TypeError, "layout: expected a Layout"),
    "names and parameters": ({"names": [*WEIGHTS.items()]}, TypeError, "names: expected strings"),
    "a step before the first": ({"step": -1}, ValueError, "step: expected an int"),
    "a step that is no int": ({"step": 1.0}, ValueError, "step: expected an int"),
}


@pytest.mark.parametrize(("change", "error", "says"), WRONG_KINDS.values(), ids=WRONG_KINDS)
def test_arguments_of_the_wrong_kind(change, error, says):
    arguments = {"torch_state": ADAM, "layout": LAYOUT, "names": NAMES} | change
    with pytest.raises(error, match=says):
        load(ADAM_STATE, **arguments)
