"""The reference's side of a check, computed from a torch module; it does not depend on the port.

From top to bottom: the reference and its inputs, its runs in the checked dtype, the oracle's run in
float64, the budgets from perturbed runs, and what probes ask.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from jax_attn.parity.checking.reference_side import ReferenceSide
from jax_attn.parity.judge.budget import PRECISIONS, RUNS, Budget
from jax_attn.parity.judge.compare import POWER, ROUNDINGS, rms
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, Run, float_dtype, is_float, wide
from jax_attn.parity.run.reference import Reference, Watch, unwatched
from jax_attn.parity.run.torch_call import buffers
from jax_attn.parity.run.torch_settings import own_products

NARROW = ("bfloat16", "float16")

_RUNS_OF_FLOAT64 = 4
# For eight numbers in bfloat16, 16 runs gave budgets of .06 to .12 of their scale, 64 runs .08.
_FEW, _MORE = 2**10, 4


class Question(NamedTuple):
    """A probe's question: its answer is plain arrays and words, or the `Prepared` of other inputs.

    by_budget: whether the answer depends on the budgets.
    """

    ask: Callable[["Prepared"], Any]
    by_budget: bool = False


@dataclass(frozen=True)
class Prepared(ReferenceSide):
    """A reference on its inputs, and all that a port is compared with; each part is computed once.

    Fields beside the attributes of `ReferenceSide`, where those are described:
    oracle: cotangents -> `Run` in float64; None stands for the reference itself in float64.
    runs: the number of perturbed runs for the budgets. as_jax, watch: as for `Reference.spread`.
    questions: those of probes, by name. canaries: the names of those to plant; None for all.
    """

    reference: Reference
    dtype: str
    gradients: bool = True
    seed: int = 0
    oracle: Callable[[Arrays], Run] | None = None
    precision: str | None = None
    declared_nan: Arrays = field(default_factory=dict)
    runs: int = RUNS
    as_jax: bool = False
    watch: Watch = unwatched
    questions: Mapping[str, Question] = field(default_factory=dict, repr=False)
    canaries: frozenset[str] | None = None

    @cached_property
    def inference(self) -> dict[str, np.ndarray]:
        """The reference's outputs in inference mode, where torch may take a faster path."""
        with self._products():
            return self.reference.outputs(self.dtype)

    @cached_property
    def cotangents(self) -> dict[str, np.ndarray]:
        """A cotangent for each floating output, standard normal, rounded to `dtype`."""
        rng = np.random.default_rng([self.seed, 1])
        dtype = float_dtype(self.dtype)
        return {
            name: rng.standard_normal(a.shape).astype(dtype)
            for name, a in self.inference.items()
            if is_float(a.dtype)
        }

    @property
    def at_hand(self) -> Reference:
        return self.reference

    @cached_property
    def inputs(self) -> Inputs:
        return self.reference.inputs

    @cached_property
    def parameters(self) -> frozenset[str] | None:
        return self.reference.parameters

    @cached_property
    def buffers(self) -> Arrays:
        return wide(buffers(self.reference.module))

    @cached_property
    def remembers(self) -> bool:
        return self.reference.remembers()

    @property
    def differentiated(self) -> dict[str, np.ndarray]:
        return self.cotangents if self.gradients else {}

    @cached_property
    def own(self) -> Run:
        with self._products():
            return self.reference.run(self.dtype, self.differentiated)

    def _products(self) -> AbstractContextManager[None]:
        """Use torch's own products if NaN is declared; oneDNN's with AMX spread it in bfloat16."""
        return own_products() if self.declared_nan else nullcontext()

    @cached_property
    def _center(self) -> tuple[Run, bool]:
        """The result of `Reference.center`."""
        return self.reference.center(self.differentiated)

    @cached_property
    def exact(self) -> Run:
        if self.oracle is None:
            run, is_exact = self._center
            return run if is_exact else self.reference.exact(self.differentiated)
        run = self.oracle(wide(self.cotangents))
        return run if self.gradients else Run(run.outputs, {}, {})

    @cached_property
    def budgets(self) -> dict[str, dict[str, Budget]]:
        center, _ = self._center
        precision = self.precision or self.dtype
        spread = partial(
            self.reference.spread,
            precision,
            self.differentiated,
            center=center,
            as_jax=self.as_jax,
            watch=self.watch,
        )
        budgets = spread(runs=self.runs)
        # A jump of one element in a few of the runs is estimated badly, too.
        jumps = self.as_jax and self.gradients and self.reference.near_sides
        if self.runs == RUNS and (jumps or self._few_numbers_decide(budgets)):
            budgets = spread(runs=_MORE * RUNS)
        coarse = PRECISIONS[precision]
        finer = max(coarse.store, coarse.operand) / coarse.acc
        if not any(
            budget.zero < rms(center.kinds[kind][name]) <= finer * budget.zero
            for kind, named in budgets.items()
            for name, budget in named.items()
        ):
            return budgets
        # A format that stores coarsely and sums finely rounds differently from float64. If a sum of
        # many terms is zero, float64 may leave more of it than the share derived from `store`, so
        # measure how much it leaves.
        own = self.reference.spread("float64", self.differentiated, _RUNS_OF_FLOAT64, center)
        return {
            kind: {
                name: replace(budget, zero=max(budget.zero, own[kind][name].zero))
                for name, budget in named.items()
            }
            for kind, named in budgets.items()
        }

    @cached_property
    def near_decisions(self) -> tuple[str, ...]:
        _ = self.budgets  # the perturbed runs find them
        return self.reference.near_decisions

    @cached_property
    def near_sides(self) -> tuple[str, ...]:
        _ = self.budgets
        return self.reference.near_sides

    def _few_numbers_decide(self, budgets: Mapping[str, Mapping[str, Budget]]) -> bool:
        """Return whether a small tensor lacks power; a few runs estimate its spread badly."""
        center, _ = self._center
        return any(
            ROUNDINGS * budget.rms > POWER * (scale := rms(center.kinds[kind][name]))
            and scale > budget.zero
            and budget.element.size < _FEW
            for kind, named in budgets.items()
            for name, budget in named.items()
        )

    @cached_property
    def nested_encoder(self) -> str:
        """The first encoder that drops padded tokens in inference mode, or ""."""
        return next(iter(nested_encoders(self.reference.module)), "")

    @cached_property
    def unnested(self) -> Arrays:
        """The outputs in inference mode without nested tensors; empty if no encoder nests."""
        called = self.reference.called(self._plainly)
        return called.outputs(self.dtype) if self.nested_encoder else {}

    def _plainly(self, module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
        for encoder in nested_encoders(module).values():
            encoder.use_nested_tensor = False
        return (self.reference.call or torch.nn.Module.__call__)(module, *args, **inputs)

    @cached_property
    def padding_rows(self) -> dict[str, int]:
        return padding_rows(self.reference.module)

    @cached_property
    def has_gradient(self) -> bool:
        """True if an output of the reference has a gradient; this takes a forward pass."""
        return self.reference.has_gradient(self.dtype)

    @cached_property
    def narrowing_casts(self) -> tuple[str, ...]:
        """The casts of the reference to a dtype coarser than `dtype`, each with its line."""
        return self.reference.narrowing_casts(self.dtype)

    @cached_property
    def again(self) -> "Prepared | None":
        """The same with a budget for what JAX stores, which is tried if a narrow dtype fails.

        None in a wide dtype, and if `self` already has that budget.
        """
        if self.dtype not in NARROW or self.as_jax:
            return None
        again = replace(self, as_jax=True)
        vars(again).update({name: vars(self)[name] for name in _SHARED if name in vars(self)})
        vars(again)["first"] = self
        return again

    @cached_property
    def first(self) -> "Prepared":
        return self

    @cached_property
    def hidden(self) -> set[str]:
        """The canaries that these inputs hide or that left a note, once a port is judged."""
        return set()

    def answer(self, question: str) -> Any:
        asked = self.questions[question]
        if self.first is not self and not asked.by_budget:
            return self.first.answer(question)
        if question not in self._answers:
            self._answers[question] = asked.ask(self)
        return self._answers[question]

    @cached_property
    def _answers(self) -> dict[str, Any]:
        return {}


_SHARED = (
    *("inference", "unnested", "nested_encoder", "cotangents", "own", "_center", "exact"),
    *("buffers", "remembers", "padding_rows", "has_gradient", "narrowing_casts"),
)
"""What `Prepared.again` need not compute anew."""


def padding_rows(module: torch.nn.Module) -> dict[str, int]:
    """Return the row `padding_idx` of every embedding that has one, by parameter name."""
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        names[id(part.weight)]: part.padding_idx
        for part in module.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)
        and part.padding_idx is not None
        and id(part.weight) in names
    }


def nested_encoders(module: torch.nn.Module) -> dict[str, torch.nn.TransformerEncoder]:
    """Return torch's encoders that nest tensors in inference mode, by path."""
    return {
        name or type(part).__name__: part
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.TransformerEncoder) and part.use_nested_tensor
    }
