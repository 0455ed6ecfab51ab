"""Decisions that a torch module takes: floating numbers in, integers out (buckets, experts, ranks).

A rounding error may flip a decision, and then every number that depends on it changes. The oracle
therefore decides as the reference does in the dtype under test. So does a perturbed run, for
decisions about constants (the buckets of positions): a port that decides these otherwise is wrong.
Other decisions (experts) each perturbed run takes itself: if they lie within rounding, a correct
port may decide otherwise.

Decisions between which the result is continuous (comparisons, maxima) are left to each run, and so
are those of a backward pass. In bfloat16 and float16, elements on which runs differ are counted: a
ReLU's gradient gains or loses a whole term there (`run.modes.sides`).

Decisions that Python takes on a number read from a tensor (`.item()`, `.tolist()`) are not seen.
Among numbers that are equal bit by bit (`topk` of a gate of zeros) the reference's choice is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from jax_attn.parity.run.modes.constants import Kwargs, Signature, mark, signature, sources_of
from jax_attn.parity.run.modes.lines import calling_line
from jax_attn.parity.run.modes.many_runs import runs_of
from jax_attn.parity.run.modes.mode import Mode
from jax_attn.parity.run.modes.module_calls import ModuleCalls
from jax_attn.parity.run.modes.sides import SIDES, one_of, side, takes_one

ROUNDINGS = frozenset({"floor", "ceil", "round", "trunc", "sign"})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_RANKS = frozenset({"topk", "sort"})
_CHOICES = frozenset({"argmax", "argmin", "bucketize", "searchsorted", "nonzero", *_RANKS})
_WITHOUT_SIDES = ROUNDINGS | _CHOICES | _COMPARISONS
DECIDING = _WITHOUT_SIDES | SIDES
_COMPARING = Lock()  # one for all decisions: perturbed runs are made in two threads


@dataclass
class Decision:
    """A decision that the reference took in the dtype under test.

    what: a description. call: the operator and the shapes of its floating arguments. constant: True
    if it depends only on constants. taken: integers, rounded numbers, or sides. is_side: True if
    each run decides by itself, because the result is continuous. natural: float64's decision; None
    if it is the same. near: a mask of the elements at which another run decides otherwise; None if
    no run does. other: for each row, the decision of the last run that differs there. held: equals
    `other` if perturbed runs take either decision, else None.
    """

    what: str
    call: Signature
    constant: bool
    taken: Tensor
    is_side: bool = False
    natural: Tensor | None = None
    near: Tensor | None = None
    other: Tensor | None = None
    held: Tensor | None = None
    _turns: Tensor | None = None

    def compare(self, other: Tensor, turn: int = 0) -> None:
        """Note where another run decides otherwise; turn: the index of that run, because concurrent
        runs finish in any order."""
        if other.shape != self.taken.shape or torch.equal(other, self.taken):
            return
        differs = other != self.taken
        with _COMPARING:
            self.near = differs if self.near is None else self.near | differs
            rows = differs.any(-1, keepdim=True)
            if self.other is None or self._turns is None:
                self.other, self._turns = self.taken, torch.full(rows.shape, -1)
            latest = rows & (self._turns <= turn)
            self.other = torch.where(latest, other, self.other)
            self._turns = torch.where(latest, turn, self._turns)


# Returns the decision that a run continues with, given the reference's decision and its own.
Policy = Callable[[Decision, Tensor], Tensor]


def settle(decision: Decision, own: Tensor) -> Tensor:
    """Return the reference's decision, and note float64's if it differs: for the first run."""
    if own.shape == decision.taken.shape and not torch.equal(own, decision.taken):
        decision.natural = own
    return decision.taken


def follow(decision: Decision, own: Tensor) -> Tensor:
    """Return the reference's decision where the run decides as the first float64 run did.

    For other runs in float64, which may have a planted bug.
    """
    natural, taken = decision.natural, decision.taken
    if natural is None or own.shape != natural.shape:
        return own
    return torch.where(own == natural, taken, own)


def perturb(decision: Decision, own: Tensor) -> Tensor:
    """Return the reference's decision about constants, else the perturbed run's own."""
    return decision.taken if decision.constant else own


def either(coins: Callable[[torch.Size], Tensor], decision: Decision, own: Tensor) -> Tensor:
    """Return the decision of `perturb`, or another that is held.

    Where another is held, it is taken in half of the runs; in a quarter, the reference's is, and in
    a quarter the run's own. If several numbers are equal in the dtype under test, half are left.
    """
    own, held, taken = perturb(decision, own), decision.held, decision.taken
    if held is None or decision.constant or own.shape != taken.shape:
        return own
    if decision.is_side:
        left = taken & coins(taken.shape)
        taken = torch.where(left.any(-1, keepdim=True), left, taken)
    differs = (held != taken).any(-1, keepdim=True)
    either = torch.where(coins(differs.shape), own, taken)
    return torch.where(differs, torch.where(coins(differs.shape), held, either), own)


@cache
def decision_name(func: OpOverload) -> str:
    """Return an operator's name, without the "_" of its in-place form."""
    return func.overloadpacket.__name__.removesuffix("_")


def decides(func: OpOverload, args: tuple, kwargs: Kwargs, *, sides: bool) -> bool:
    """Return whether an operator of a forward pass decides about floating numbers.

    sides: count operators that only take a side.
    """
    name = decision_name(func)
    if name == "_to_copy":
        dtype = kwargs.get("dtype")
        chosen = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    else:
        chosen = name in (DECIDING if sides else _WITHOUT_SIDES)
    floating = any(isinstance(x, Tensor) and x.is_floating_point() for x in args)
    return chosen and floating and torch._C._current_graph_task_id() == -1


class DecisionRecorder(Mode):
    """A mode that records a module's decisions; `constants.mark` marks those about constants."""

    def __init__(self, module: torch.nn.Module, *, sides: bool):
        super().__init__()
        self._sides = sides
        self.decisions: list[Decision] = []
        self._calls = ModuleCalls(module)

    def __enter__(self) -> "DecisionRecorder":
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._calls.__exit__(*raised)
        super().__exit__(*raised)

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        made_by, call = sources_of(func, args, kwargs), signature(func, args, kwargs)
        name, constant = decision_name(func), made_by is not None
        is_side = name in SIDES or (name in _COMPARISONS and not constant)
        recorded = decides(func, args, kwargs, sides=self._sides)
        taken = side(name, args, kwargs) if recorded and name in SIDES else None
        result = func(*args, **kwargs)
        mark(result, made_by)
        if recorded:
            path, line = self._calls.named, calling_line()
            place = f"in `{path}` ({line})" if path else f"at {line}"
            what = f"cast to {kwargs['dtype']}" if name == "_to_copy" else name
            what = f"the reference's {what.replace('torch.', '')} {place}"
            taken = _decided(result).detach().clone() if taken is None else taken
            self.decisions.append(Decision(what, call, constant, taken, is_side))
        return result


class DecisionReplay:
    """The reference's decisions, in order, replayed in one float64 run.

    lost: True once the run's order of operators differs; from then on the run decides by itself.
    """

    def __init__(
        self,
        decisions: Iterable[Decision],
        policy: Policy,
        *,
        sides: bool,
        turns: Sequence[int] = (0,),
    ):
        """sides: whether sides are among the decisions. turns: the index of the run among all, or
        that of each run of a pass."""
        self._left, self._policy, self._sides = list(decisions)[::-1], policy, sides
        self._turns = turns
        self.lost = False

    def result(self, func: OpOverload, args: tuple, kwargs: Kwargs, result: Any) -> Any:
        """Return the result with which the run continues after an operator."""
        if not self._left or not decides(func, args, kwargs, sides=self._sides):
            return result
        decision = self._left.pop()
        if decision.call != signature(func, args, kwargs):
            self._left, self.lost = [], True
            return result
        name = decision_name(func)
        took_side = decision.is_side and name in SIDES
        own = side(name, args, kwargs) if took_side else _decided(result)
        if self._policy is not follow:  # which may have a bug
            for own_of_run, turn in zip(runs_of(own, len(self._turns)), self._turns, strict=True):
                decision.compare(own_of_run, turn)
        if decision.is_side and not self._takes_either(decision, name, args, kwargs):
            return result
        going_on = self._policy(decision, own)
        if going_on is own:
            return result
        if decision.is_side:
            return one_of(going_on, name, result, args, kwargs)
        going_on = going_on.to(own.dtype)
        if name not in _RANKS:
            return going_on
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | {**kwargs}
        return args[0].gather(named.get("dim", -1), going_on), going_on

    def _takes_either(self, decision: Decision, name: str, args: tuple, kwargs: Kwargs) -> bool:
        """Return whether this run may continue with another of several numbers as the largest."""
        held = decision.held is not None and self._policy is not follow
        return held and takes_one(name, args, kwargs)


class DecisionDetector(DecisionReplay):
    """Leaves every decision to the run. decides: True once it met one about floating numbers."""

    def __init__(self, *, sides: bool) -> None:
        super().__init__((), perturb, sides=sides)
        self.decides = False

    def result(self, func: OpOverload, args: tuple, kwargs: Kwargs, result: Any) -> Any:
        self.decides = self.decides or decides(func, args, kwargs, sides=self._sides)
        return result


class Decisions(list[Decision]):
    """All decisions of the reference in a call, in order.

    sides: whether sides are among them. lost: True if a perturbed run, or the first float64 run,
    took its decisions in another order.
    """

    lost = False

    def __init__(self, decisions: Iterable[Decision] = (), *, sides: bool = False):
        super().__init__(decisions)
        self.sides = sides

    def replay(self, policy: Policy, turns: Sequence[int] = (0,)) -> DecisionReplay:
        """Return a replay for one run; empty if the runs take all decisions and none is counted."""
        any_taken = self.sides or not all(decision.is_side for decision in self)
        return DecisionReplay(self if any_taken else (), policy, sides=self.sides, turns=turns)

    def hold(self, *, both: bool) -> None:
        """Set whether later runs take either decision where the runs so far have differed.

        A few runs estimate badly how often a correct port decides otherwise: in bfloat16, where two
        probabilities are often the same number, each library breaks the tie in its own way.
        """
        for decision in self:
            decision.held = decision.other if both else None

    def near(self) -> tuple[str, ...]:
        """Return a sentence for each place where a decision lies within rounding of another."""
        sentences = tuple(
            f"{what} lies within rounding of another value at {near} of {total} elements: a "
            "correct port may decide otherwise there (elements that a mask hides are counted too)"
            for what, (near, total) in self._counts(of_sides=False).items()
        )
        return (*sentences, _LOST) if self.lost else sentences

    def near_sides(self) -> tuple[str, ...]:
        """Return a sentence for each place where a number is within rounding of a bound."""
        return tuple(
            f"{what} has {near} of {total} elements within rounding of where its gradient jumps "
            "(a ReLU's 0): there a correct port may gain or lose a whole gradient term; to decide, "
            "use other inputs, more of them, or float32"
            for what, (near, total) in self._counts(of_sides=True).items()
        )

    def _counts(self, *, of_sides: bool) -> dict[str, tuple[int, int]]:
        """Return, by the decision's `what`, the number of near elements and of all elements."""
        counts: dict[str, tuple[int, int]] = {}
        for decision in self:
            if decision.near is not None and decision.is_side == of_sides:
                near, total = counts.get(decision.what, (0, 0))
                near += int(decision.near.sum())
                counts[decision.what] = near, total + decision.near.numel()
        return counts


_LOST = (
    "the reference makes its integer decisions in another order if its numbers are rounded "
    "differently: they could not be kept the same in every run, so the budget may be too wide"
)


def _decided(result: Any) -> Tensor:
    """Return the decision in an operator's result: the indices, if it has values and indices."""
    return result[-1] if isinstance(result, tuple | list) else result
