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

REFUSED = {  # torch's state dict, other arguments, every (kind, name), what it says
    "no state yet": (
        ADAM | {"state": {}},
        {},
        [("missing", "exp_avg"), ("missing", "exp_avg_sq"), ("missing", "step")],
        "torch has it for 0 parameters, optax has 8 arrays of mu",
    ),
    "no state for one parameter": (
        NO_STATE,
        {},
        [("missing", f"exp_avg of {KEY}"), ("missing", f"exp_avg_sq of {KEY}")],
        "torch keeps nothing for a parameter that had no gradient yet",
    ),
    "one moment of one parameter": (
        keeping({"exp_avg_sq": None}),
        {},
        [("missing", f"exp_avg_sq of {KEY}")],
        f'row("{KEY}"',
    ),
    "no momentum yet for one parameter": (
        keeping({"momentum_buffer": None}, here=SGD),
        {},
        [("missing", f"momentum_buffer of {KEY}")],
        "had no gradient yet",
    ),
    "a state of no parameter": (
        keeping({}, of=8),
        {},
        [("unexpected", "state[8]")],
        "expected an id of the param_groups",
    ),
    "no step beside the moments": (
        keeping({"step": None}),
        {},
        [("missing", f"step of {KEY}")],
        "got only exp_avg, exp_avg_sq",
    ),
    "steps that differ": (
        keeping({"step": torch.tensor(2.0)}, of=1),
        {},
        [("ambiguous", "step")],
        f"got 1 ({KEY}), 2 ({OTHER})",
    ),
    "half a step": (
        keeping({"step": torch.tensor(0.5)}),
        {},
        [("unreadable", f"step of {KEY}")],
        "a whole number below 2³¹, got 0.5",
    ),
    "a step that is no number": (
        keeping({"step": torch.tensor(torch.nan)}),
        {},
        [("unreadable", f"step of {KEY}")],
        "got nan",
    ),
    "more steps than optax counts": (
        keeping({"step": torch.tensor(2.0**31)}),
        {},
        [("unreadable", f"step of {KEY}")],
        "below 2³¹",
    ),
    "another step said": (ADAM, {"step": 2}, [("ambiguous", "step")], f"got 1 ({KEY}), 2 (step=)"),
    "wrong shape": (
        keeping({"exp_avg": AVG.T}),
        {},
        [("wrong shape", f"exp_avg of {KEY}")],
        f"got {[*SHAPE[::-1]]}",
    ),
    "wrong dtype": (
        keeping({"exp_avg": AVG.double()}),
        {},
        [("wrong dtype", f"exp_avg of {KEY}")],
        "got float64",
    ),
    "sparse": (
        keeping({"exp_avg": AVG.to_sparse()}),
        {},
        [("unreadable", f"exp_avg of {KEY}")],
        ".to_dense()",
    ),
    "a list for a moment": (
        keeping({"exp_avg": [1.0]}),
        {},
        [("unreadable", f"exp_avg of {KEY}")],
        "got list",
    ),
    "amsgrad": (
        stepped(torch.optim.Adam, amsgrad=True),
        {},
        [("refused", "param_groups[0].amsgrad"), ("unexpected", "max_exp_avg_sq")],
        "the largest of the uncorrected second moments",
    ),
    "maximize": (
        having(ADAM, maximize=True),
        {},
        [("refused", "param_groups[0].maximize")],
        "negated gradients",
    ),
    "dampening": (
        having(SGD, dampening=0.1),
        {},
        [("refused", "param_groups[0].dampening")],
        "adds each gradient whole",
    ),
    "another algorithm of torch": (
        stepped(torch.optim.RMSprop),
        {},
        [
            ("refused", "param_groups[0]"),
            ("unexpected", "step"),
            ("unexpected", "square_avg"),
            ("missing", "exp_avg"),
            ("missing", "exp_avg_sq"),
            ("missing", "step"),
        ],
        "expected options of Adam, AdamW or SGD, got lr, ",
    ),
    "one group, no names": (
        ADAM,
        {"names": None},
        [("missing", "names")],
        "the state dict has no param_names",
    ),
    "too few names": (
        ADAM,
        {"names": NAMES[:-1]},
        [("missing", "names")],
        "expected [8] by group, got [7]",
    ),
    "a name twice": (
        ADAM,
        {"names": [*NAMES[:-1], KEY]},
        [("ambiguous", "names")],
        f"['{KEY}'] several times",
    ),
    "one list of names for two groups": (
        IN_TWO,
        {},
        [("ambiguous", "names")],
        "expected a list of names for each of the 2 groups",
    ),
    "names in another order than the groups'": (
        IN_TWO,
        {"names": [NAMES[:5], NAMES[5:]]},
        [("missing", "names")],
        "expected [3, 5] by group, got [5, 3]",
    ),
    "names that are not the optimizer's own": (
        having(ADAM, param_names=NAMES[::-1]),
        {},
        [("ambiguous", "names")],
        "param_groups[0] names its parameters",
    ),
    "a key that the table lacks": (
        ADAM,
        {"names": ["rotary.weight", *NAMES[1:]]},
        [
            (kind, f"{moment} of {key}")
            for moment in ("exp_avg", "exp_avg_sq")
            for kind, key in (("missing", KEY), ("unexpected", "rotary.weight"))
        ],
        "no row takes it",
    ),
    "several at once": (
        having(keeping({"exp_avg": AVG.T, "exp_avg_sq": None}), maximize=True),
        {},
        [
            ("refused", "param_groups[0].maximize"),
            ("wrong shape", f"exp_avg of {KEY}"),
            ("missing", f"exp_avg_sq of {KEY}"),
        ],
        "3 problems",
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
