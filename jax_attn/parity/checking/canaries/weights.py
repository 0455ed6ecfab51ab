"""Canaries of weights: those without effect, those that nothing reads, and a padding row."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.bugs.tensors import with_inputs, with_tensors
from jax_attn.parity.checking.canaries.mask_patterns import hides_one_end
from jax_attn.parity.checking.canaries.masks import is_mask
from jax_attn.parity.checking.canaries.seen import changes, same
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote
from jax_attn.parity.judge.text import quoted
from jax_attn.parity.run.inputs_and_runs import is_float
from jax_attn.parity.run.modes.constants import Kwargs, storages
from jax_attn.parity.run.modes.float64_mode import Float64, is_view
from jax_attn.parity.run.reference import Reference

# --- a running mean of 0, a norm's weight of 1 ----------------------------------------------------


_NEUTRAL = (0.0, 1.0)
"""Adding 0 has no effect; multiplying or dividing by 1 has none."""

_REMEDY = "other numbers there on both sides, such as those of a trained model"


def try_neutral_weights(prepared: Prepared) -> Findings:
    """Note neutral weights that would change the outputs at other values; one run for each name.

    A gradient shows that a parameter is read, but not in which formula: 1 + w and exp(w) agree at
    0. A sum has one formula, so a bias is not noted if gradients are compared.
    """
    module = prepared.reference.module
    kept = module.state_dict().keys()  # not the integers of a buffer that no checkpoint has
    buffers = [(k, x) for k, x in module.named_buffers() if x.is_floating_point() or k in kept]
    notes: list[Finding] = list(_left_out(prepared, "buffer", buffers))
    if prepared.gradients:
        for value, names in _constants(module.named_parameters()):
            if value in _NEUTRAL and "bias" not in names[0].rpartition(".")[2]:
                notes.append(_formula(names, value))
    else:
        notes += _left_out(prepared, "parameter", module.named_parameters())
        notes += _neutral_inputs(prepared)
    return Findings(notes=tuple(notes))


def _constants(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[float, list[str]]]:
    """Yield each value with the tensors that hold only it, grouped by last name."""
    alike: dict[tuple[str, float], list[str]] = {}
    for name, x in tensors:
        is_number = x.dtype is not torch.bool and not x.is_complex()
        if is_number and x.layout is torch.strided and not x.is_meta and x.numel():
            first = float(x.detach().flatten()[0])
            if bool((x == first).all()):
                alike.setdefault((name.rpartition(".")[2], first), []).append(name)
    return ((value, names) for (_, value), names in alike.items())


def _left_out(
    prepared: Prepared, kind: str, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[Finding]:
    for value, names in _constants(tensors):
        if value in _NEUTRAL and _change_outputs(prepared, {*names}):
            s, are, them = _number(names)
            yield Finding(
                "neutral-weights",
                f"{kind}{s} {quoted(names)} of the reference {are} {value:g} throughout, so a port "
                f"that leaves {them} out may pass; to show it, use {_REMEDY}",
            )


def _neutral_inputs(prepared: Prepared) -> Iterator[Finding]:
    """Note floating-point inputs of only 0 or 1 that would change the outputs at other values.

    No port leaves out its only input."""
    inputs = prepared.inputs.by_name
    for name, a in inputs.items() if len(inputs) > 1 else ():
        is_one = a.size > 0 and is_float(a.dtype) and (a == a.flat[0]).all()
        if not is_one or a.flat[0] not in _NEUTRAL or is_mask(prepared.reference, name, a):
            continue
        others = {name: a + np.linspace(0.25, 0.75, a.size, dtype=a.dtype).reshape(a.shape)}
        if changes(prepared, with_inputs(prepared.reference, others)):
            yield Finding(
                "neutral-input",
                f"input {name!r} is {float(a.flat[0]):g} throughout, so a port that leaves it out "
                "may pass; to show it, use other numbers, or gradients=True",
            )


def _number(names: list[str]) -> tuple[str, str, str]:
    """Return the words of a sentence about one name, or several."""
    return ("s", "are", "them") if names[1:] else ("", "is", "it")


def _formula(names: list[str], value: float) -> StandingNote:
    s, are, them = _number(names)
    return StandingNote(
        "neutral-formula",
        f"parameter{s} {quoted(names)} of the reference {are} {value:g} throughout, so a port that "
        f"uses {them} in another formula, such as exp(w) for 1 + w, may pass; to show it, use "
        f"{_REMEDY}",
    )


def _change_outputs(prepared: Prepared, names: set[str]) -> bool:
    """Return whether other values of these buffers or parameters would fail an output."""
    module = prepared.reference.module
    held = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    tied = {id(x) for name, x in held if name in names}
    others = {name: _other for name, x in held if id(x) in tied}
    return changes(prepared, with_tensors(prepared.reference, others))


def _other(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind whose numbers are others."""
    if not x.is_floating_point():
        return x + (torch.arange(1, x.numel() + 1, dtype=x.dtype) % 2).reshape(x.shape)
    return x + torch.linspace(0.25, 0.75, x.numel(), dtype=x.dtype).reshape(x.shape)


# --- weights that no output depends on, such as experts that no input is routed to ----------------


class _Reads(Float64):
    """Float64 that records the storages that operators read, unless the result has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.parameters: dict[str, int] = {}

    def run_on(self, module: torch.nn.Module) -> None:
        self.parameters = {
            name: p.untyped_storage().data_ptr() for name, p in module.named_parameters()
        }

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        result = super().dispatched(func, args, kwargs)
        if not is_view(func) and (not isinstance(result, torch.Tensor) or result.numel()):
            self.storages.update(storages((args, kwargs)))
        return result


def try_unread(prepared: Prepared) -> Findings:
    """Note the parameters that no operator reads, if gradients are not compared."""
    if prepared.gradients:
        return Findings()
    mode = _Reads()
    if run_planted(prepared.reference, mode) is None:
        return Findings()
    unread = [name for name, storage in mode.parameters.items() if storage not in mode.storages]
    if not unread:
        return Findings()
    them = "them" if unread[1:] else "it"
    note = (
        f"no input reaches {quoted(unread)}: no output is computed from {them}, so a port with "
        f"other numbers there may pass; to show it, use inputs that are routed to {them}"
    )
    return Findings(notes=(Finding("unreached-weights", note),))


# --- padding of ids that the reference treats specially (RoBERTa's positions) ---------------------


def try_padding_ids(prepared: Prepared) -> Findings:
    """Note ids without their embedding's padding id, or with it only at one end of each row, if the
    reference treats that id specially.

    If two ids are exchanged, and their rows of the embedding too, the outputs stay the same, unless
    one of the ids has a meaning beyond its row.
    """
    notes: list[Finding] = []
    for path, table in prepared.reference.module.named_modules():
        if not isinstance(table, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if (pad := table.padding_idx) is None:
            continue
        for name, ids in prepared.inputs.by_name.items():
            if ids.dtype.kind not in "iu" or ids.size == 0 or (ids == pad).all():
                continue
            others = ids[ids != pad]
            used = int(others[len(others) // 2])
            exchanged = partial(_exchanged, prepared, path, name, used)
            is_padded = bool((ids == pad).any())
            is_bag = isinstance(table, torch.nn.EmbeddingBag)  # which has no places
            if is_padded and (is_bag or not hides_one_end(ids == pad)):
                continue
            other = next((i for i in range(len(table.weight)) if i not in (pad, used)), used)
            if not (_is_same(prepared, exchanged(other)) and changes(prepared, exchanged(pad))):
                continue
            if is_padded:
                notes.append(StandingNote("mask-one-end", _ONE_END.format(name, pad, path)))
            else:
                notes.append(Finding("no-padding", _NO_PADDING.format(name, pad, path)))
    return Findings(notes=tuple(notes))


_ONE_END = (
    "input {0!r} holds {1}, the padding of `{2}`, only at one end of each row, so a port that "
    "counts places in place of tokens may pass; to show it, use rows that are padded at the other "
    "end, too"
)
_NO_PADDING = (
    "no id of input {0!r} is {1}, the padding of `{2}`, which the reference treats apart from "
    "other ids, so what the port makes of it was not checked; to show it, use rows that end in "
    "some ids of {1}"
)


def _exchanged(prepared: Prepared, path: str, name: str, a: int, b: int) -> Reference:
    """Return the reference with ids `a` and `b` exchanged, and their rows of one embedding."""
    ids = prepared.inputs.by_name[name]
    others = np.where(ids == a, b, np.where(ids == b, a, ids))

    def rows(table: torch.Tensor) -> torch.Tensor:
        table[[a, b]] = table[[b, a]]
        return table

    reference = with_tensors(prepared.reference, {f"{path}.weight".removeprefix("."): rows})
    return with_inputs(reference, {name: others})


def _is_same(prepared: Prepared, reference: Reference) -> bool:
    exact, run = prepared.exact.kinds["output"], run_planted(reference)
    return run is not None and all(
        got.shape == exact[name].shape and same(got, exact[name])
        for name, got in run.kinds["output"].items()
    )
