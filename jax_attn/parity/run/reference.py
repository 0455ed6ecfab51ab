"""Run a torch module: in its own dtype, in float64, and in float64 with perturbed operations."""

import contextlib
import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from jax_attn.parity.judge.budget import PRECISIONS, RUNS, Budget, Spread
from jax_attn.parity.run.at_once import in_order
from jax_attn.parity.run.inputs_and_runs import (
    Arrays,
    Inputs,
    Run,
    changed,
    is_float,
    named_outputs,
)
from jax_attn.parity.run.modes.constants import Recorder
from jax_attn.parity.run.modes.decisions import (
    DecisionDetector,
    DecisionRecorder,
    Decisions,
    either,
    follow,
    settle,
)
from jax_attn.parity.run.modes.draws import PART
from jax_attn.parity.run.modes.float64_mode import TORCH_DTYPES, Float64, Unperturbed, rounds
from jax_attn.parity.run.modes.many_runs import OneByOne
from jax_attn.parity.run.modes.narrowing import Narrowing
from jax_attn.parity.run.modes.perturbed_mode import Perturbed
from jax_attn.parity.run.modes.sums import ProductErrors
from jax_attn.parity.run.module_copies import ModuleCopies
from jax_attn.parity.run.torch_call import TorchCall, arrays, lift_buffers
from jax_attn.parity.run.torch_settings import one_thread, plain_kernels, set_for_all_threads

_AT_ONCE = 2
"""The number of concurrent perturbed runs; each takes the memory of a run's gradients."""
LONG = 0.1
"""Seconds per run above which two runs are concurrent: for runs of .2 s and more, this took no more
processor time than one after another."""

_SMALL = PART
"""The largest size of a run's largest tensor for which one pass makes all perturbed runs. Larger
tensors of all runs leave the caches, so a pass takes as long as one run after another."""

MakeMode = Callable[..., Perturbed]
"""(seeds, ...) -> the mode of a run, or of one run for each seed."""
Runs = Generator[Run, None, None]
Watch = Callable[[Runs, int], Runs]
"""(runs, total) -> the same runs, passed on one by one."""


def unwatched(runs: Runs, total: int) -> Runs:
    return runs


def _held(a: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the array with finite numbers clipped to the dtype's range, which finfo(x.dtype).min
    of a mask exceeds in float64."""
    if not is_float(a.dtype):
        return a
    most = torch.finfo(dtype).max
    with np.errstate(invalid="ignore"):
        is_beyond = (np.abs(a) > most) & np.isfinite(a)
    return np.where(is_beyond, np.copysign(most, a), a) if is_beyond.any() else a


@dataclass(frozen=True)
class Reference:
    """A torch module with its inputs. Each run works on a copy of the module.

    parameters: the names of those that are differentiated; None means all. others: the other inputs
    that are checked with the same port: what acts on one of them need not act on all.
    """

    module: torch.nn.Module
    call: Callable[..., Any] | None
    inputs: Inputs
    parameters: frozenset[str] | None = None
    others: tuple[Inputs, ...] = ()

    @property
    def _as_called(self) -> TorchCall:
        return TorchCall(self.call, self.inputs, self.parameters)

    @cached_property
    def _copies(self) -> ModuleCopies:
        return ModuleCopies(self.module)

    def given(self, inputs: Inputs) -> "Reference":
        """Return the same module on other inputs; it shares copies and recorded decisions."""
        return self._sharing(replace(self, inputs=inputs))

    def called(self, call: Callable[..., Any]) -> "Reference":
        """Return the same module with another call; it shares copies and recorded decisions."""
        return self._sharing(replace(self, call=call))

    def deciding_anew(self, inputs: Inputs | None = None) -> "Reference":
        """Return the same module, sharing copies, with decisions recorded on its own inputs.

        inputs: those of the new reference; None keeps them.
        """
        vars(other := replace(self, inputs=inputs or self.inputs))["_copies"] = self._copies
        return other

    def _sharing(self, other: "Reference") -> "Reference":
        vars(other).update(_copies=self._copies, _decisions=self._decisions)
        return other

    def expect_unwritten(self) -> None:
        """Raise RuntimeError if a run changed the parameters that all runs share."""
        self._copies.expect_unwritten()

    def outputs(self, dtype: str) -> dict[str, np.ndarray]:
        """Return the outputs in inference mode, where torch may take a faster path."""
        module = self._copies.as_it_is()
        args, kwargs = self._as_called.tensors(TORCH_DTYPES[dtype], requires_grad=False)
        with one_thread(), torch.inference_mode():
            return arrays(self._as_called.outputs(module, args, kwargs))

    def repeats(self, dtype: str, outputs: Arrays) -> bool:
        """Return whether another forward pass gives the same bits, so nothing in it is random."""
        again = self.outputs(dtype)
        return all(again[name].tobytes() == array.tobytes() for name, array in outputs.items())

    def run(self, dtype: str, cotangents: Arrays) -> Run:
        """Run in `dtype`, with the kernels that torch itself chooses: outputs and gradients."""
        with one_thread():
            module = self._copies.as_it_is()
            return self._as_called.run(module, TORCH_DTYPES[dtype], cotangents, again=True)

    def exact(self, cotangents: Arrays) -> Run:
        """Run in float64, widening every cast to a narrower type: outputs and gradients."""
        return self.under(Float64(), cotangents, again=True)

    def center(self, cotangents: Arrays) -> tuple[Run, bool]:
        """Return the run that perturbed runs spread about, and whether it equals `exact`.

        They differ if some softmax has an empty row.
        """
        mode = Unperturbed()
        run = self.under(mode, cotangents, again=True)
        vars(self)["_largest"] = mode.largest
        return run, not mode.met_empty_rows

    def under(self, mode: Float64, cotangents: Arrays, *, again: bool = False) -> Run:
        """Run in float64 under `mode`, with attention from its parts: outputs and gradients.

        again: call a module that changed its buffers a second time.
        """
        if not isinstance(mode, Perturbed):
            mode.replay = self._decisions.replay(follow)
            return self._under(mode, cotangents, again=again)
        mode.replay = self._decisions.replay(partial(either, mode.rounding.coins), mode.seeds)
        run = self._under(mode, cotangents, again=again)
        if mode.replay.lost:
            self._decisions.lost = True  # never set back: two threads may be here
        return run

    def _under(self, mode: Float64, cotangents: Arrays, *, again: bool) -> Run:
        module, mode.dtype = self._copies.wide(), self._dtype
        mode.run_on(module)
        runs = mode.runs if isinstance(mode, Perturbed) else None
        passing: Any = contextlib.nullcontext() if runs is None else OneByOne()
        if runs is not None:
            lift_buffers(module, runs)
        with one_thread(), plain_kernels(), passing, mode:
            run = self._as_called.run(module, torch.float64, cotangents, again=again, runs=runs)
        return replace(
            run,
            outputs={name: _held(a, self._dtype) for name, a in run.outputs.items()},
            second={name: _held(a, self._dtype) for name, a in run.second.items()},
        )

    @cached_property
    def _decisions(self) -> Decisions:
        """The module's decisions in its own dtype, and those of float64; most modules have none."""
        mode, sides = Float64(), self._dtype in (torch.bfloat16, torch.float16)
        mode.replay = probe = DecisionDetector(sides=sides)
        try:
            self._under(mode, {}, again=True)
        except Exception:
            return Decisions()  # the error is reported when the call's outputs are needed
        if not probe.decides:
            return Decisions()
        recorder = DecisionRecorder(module := self._copies.as_it_is(), sides=sides)
        with one_thread(), plain_kernels(), recorder:
            self._as_called.run(module, self._dtype, {}, again=True)
        decisions = Decisions(recorder.decisions, sides=sides)
        mode.replay = decisions.replay(settle)
        self._under(mode, {}, again=True)
        decisions.lost = mode.replay.lost
        return decisions

    @property
    def near_decisions(self) -> tuple[str, ...]:
        """A sentence for each place at which some run so far decided otherwise."""
        return self._decisions.near()

    @property
    def near_sides(self) -> tuple[str, ...]:
        """A sentence for each place, in a narrow dtype, at which some run took another side."""
        return self._decisions.near_sides()

    def spread(
        self,
        precision: str,
        cotangents: Arrays,
        runs: int = RUNS,
        center: Run | None = None,
        *,
        as_jax: bool = False,
        watch: Watch = unwatched,
    ) -> dict[str, dict[str, Budget]]:
        """Return kind -> name -> `Budget`, from `runs` perturbed float64 runs, none of them kept.

        center: the run that `center` returns, if it exists already. as_jax: allow for what JAX
        stores and torch does not, as in `Perturbed`. watch: wraps the iterator of the runs.
        """
        rounding = PRECISIONS[precision]
        recorder = self._recorded(precision)
        stored = recorder.stored_softmaxes if as_jax else None
        self._decisions.hold(both=as_jax)
        center = center or self.center(cotangents)[0]
        decided = {name for name, a in center.outputs.items() if not is_float(a.dtype)}
        spreads = {
            kind: {
                name: Spread(value, rounding, is_decided=kind == "output" and name in decided)
                for name, value in tensors.items()
            }
            for kind, tensors in center.kinds.items()
        }
        dtype = TORCH_DTYPES.get(precision)
        narrow = {name for name, x in self.module.named_buffers() if x.dtype is dtype}
        mode = partial(Perturbed, rounding, constants=recorder.constants, as_jax=stored)
        with (
            contextlib.closing(self._perturbed(mode, runs, cotangents, narrow)) as made,
            contextlib.closing(watch(made, runs)) as watched,
        ):
            for run in watched:
                for kind, tensors in run.kinds.items():
                    for name, value in tensors.items():
                        spreads[kind][name].add(value)
                del run, tensors, value  # before the next one is made
        # Drop a tensor's sums once its budget is made.
        return {
            kind: {name: tensors.pop(name).budget() for name in list(tensors)}
            for kind, tensors in spreads.items()
        }

    def _perturbed(
        self, mode: MakeMode, runs: int, cotangents: Arrays, narrow: Collection[str]
    ) -> Runs:
        """Yield the perturbed runs in order: a small module's from one pass, a large one's from two
        threads.

        narrow: the buffers that are kept in the precision between calls.
        """
        has_grad, threads = torch.is_grad_enabled(), torch.get_num_threads()

        def perturbed(mode: Perturbed) -> Run:
            with torch.set_grad_enabled(has_grad):  # another thread has its own
                run = self.under(mode, cotangents, again=True)
            left = {k: mode.kept(a) if k in narrow else a for k, a in run.left.items()}
            return replace(run, left=left)

        seeds = range(1, runs + 1)
        if self._is_small:
            try:
                together = perturbed(mode(seeds))
            except MemoryError:
                raise
            except Exception:  # the runs may branch differently: make each by itself
                pass
            else:
                yield from (together.one(i) for i in range(runs))
                return
        first = ProductErrors()
        modes = (mode(seed, products=ProductErrors(first) if seed > 1 else first) for seed in seeds)
        begun = time.perf_counter()
        yield from map(perturbed, islice(modes, 1))
        if threads == 1 or time.perf_counter() - begun < LONG:
            yield from map(perturbed, modes)
            return
        with set_for_all_threads():
            yield from in_order(perturbed, modes, _AT_ONCE)

    @property
    def _is_small(self) -> bool:
        if any(p.is_complex() for p in self.module.parameters()):
            return False  # a pass does not keep apart the runs of a complex gradient
        largest = getattr(self, "_largest", _SMALL)
        return max([largest, *(p.numel() for p in self.module.parameters())]) <= _SMALL

    def remembers(self) -> bool:
        """Return whether a second call of one copy gives other outputs than the first."""
        module, outputs = self._copies.wide(), self._as_called.outputs
        # Each call has its own inputs: a module may write to them.
        given = [self._as_called.tensors(torch.float64, requires_grad=False) for _ in range(2)]
        with one_thread(), torch.no_grad(), Float64():
            first, second = (
                {k: a.copy() for k, a in arrays(outputs(module, *each)).items()} for each in given
            )
        return bool(changed(first, second))

    def has_gradient(self, dtype: str) -> bool:
        """Return whether an output has a gradient."""
        have_gradients: list[bool] = []

        def call(module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
            outputs = (self.call or torch.nn.Module.__call__)(module, *args, **inputs)
            named = named_outputs(outputs, torch.Tensor, "reference")
            have_gradients.extend(x.requires_grad for x in named.values())
            return outputs

        self.called(call).run(dtype, {})
        return any(have_gradients)

    def narrowing_casts(self, dtype: str) -> tuple[str, ...]:
        """Return the casts to a dtype coarser than `dtype`, each with its line."""
        mode = Narrowing(TORCH_DTYPES[dtype])
        with mode:
            self.run(dtype, {})
        return tuple(mode.casts)

    def _recorded(self, precision: str) -> Recorder:
        """Record the dtypes of the module's constants and softmaxes; nothing unless `precision` is
        narrow and all parameters have it."""
        dtype, recorder = TORCH_DTYPES.get(precision), Recorder(rounds)
        other = any(p.dtype is not dtype for p in self.module.parameters())
        if dtype in (torch.bfloat16, torch.float16) and not other:
            with one_thread(), plain_kernels(), recorder:
                self._as_called.run(self._copies.as_it_is(), dtype, {}, again=True)
        return recorder

    @property
    def _dtype(self) -> torch.dtype:
        """The narrowest dtype of the parameters and floating inputs; float32 if there are none."""
        given = (*self.inputs.args, *self.inputs.kwargs.values())
        names = {a.dtype.name for a in given}
        dtypes = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        dtypes |= {dtype for name, dtype in TORCH_DTYPES.items() if name in names}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
