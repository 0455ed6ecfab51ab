"""Make inputs on which a wrong port would show: from the reference's signature, sizes and runs.

No family of models is known here: a table maps names of parameters to possible arrays
(`input_table`), the sizes are read (`reference_sizes`), and the reference is run on each choice.
A choice that it refuses, or that makes it not finite, is replaced by the next simpler one.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch

from jax_attn.parity.checking.arguments import (
    call_problems,
    dtype_problems,
    seed_problems,
    seed_type_problems,
    type_problems,
)
from jax_attn.parity.checking.suggestion.input_table import (
    ADDED,
    Lengths,
    MaskForm,
    choices_of,
    is_mask,
    is_position,
    mask_forms,
    may_be_asked_for,
    row_of,
)
from jax_attn.parity.checking.suggestion.reference_sizes import ReferenceSizes, other_prime
from jax_attn.parity.checking.suggestion.trials import ReferenceTrial, Signature
from jax_attn.parity.judge.text import joined
from jax_attn.parity.pair.pair import Given
from jax_attn.parity.run.inputs_and_runs import Arrays

_TRIALS = 2000
"""Limit of choices that are tried before one runs; a signature may have many unknown widths."""


Call = Callable[..., Any] | None


@overload
def suggest_inputs(
    reference: torch.nn.Module,
    *,
    reference_call: Call = None,
    given: Arrays | None = None,
    dtype: str = "float32",
    seed: int = 0,
    sets: None = None,
) -> Given: ...


@overload
def suggest_inputs(
    reference: torch.nn.Module,
    *,
    reference_call: Call = None,
    given: Arrays | None = None,
    dtype: str = "float32",
    seed: int = 0,
    sets: int,
) -> list[Given]: ...


def suggest_inputs(
    reference: torch.nn.Module,
    *,
    reference_call: Call = None,
    given: Arrays | None = None,
    dtype: str = "float32",
    seed: int = 0,
    sets: int | None = None,
) -> Given | list[Given]:
    """Make inputs for `check` that reveal what ports usually get wrong.

    B is at least 3. B, T and, if keys may come from another sequence, S are distinct primes that
    equal neither the number of heads nor a width. T is longer than every window, distance and
    number of buckets in the config or in an attribute with such a name, if that is at most 300; a
    longer window never takes effect, and `check` can only doubt it. Floats are standard normal. Ids
    are drawn over the whole vocabulary, with `padding_idx` among them once, and a config's
    `eos_token_id` twice in each row, after two thirds of it and at its end. Token types take all
    their values; positions are in random order. Masks hide one key of the first row and several of
    each other row, and, if the reference stays finite and accurate forward and backward, all keys
    of the last row. Optional parameters are left out if they change no output or if no rule knows
    their name. Positions are left out if the reference itself computes them as something other than
    0, 1, 2, …, for example from the padding.

    Args:
      reference: the torch module, with its weights in place and in `dtype`. A copy is run.
      reference_call: as for `check`. Arrays are made for its parameters after the module, by name;
        if it takes only `**inputs`, for the parameters of the module.
      given: fixed arrays, by parameter; the others are made to fit them. Use it for a parameter
        that no rule knows, or one whose values have a meaning.
      dtype: the dtype of the reference.
      seed: the seed of the random arrays; the same seed makes the same arrays.
      sets: how many inputs to make, each of other sizes than the one before: what is odd in the
        first is even in the second. Some mistakes, such as SAME for an explicit padding, show at
        only one of them. `check` takes the list.

    Returns:
      A dict of arrays by parameter, or a tuple if the parameters are passed by position; with
      `sets`, a list of these.

    Raises:
      ValueError: parameters without a default that no rule knows, all named; or the reference
        refused every choice.
    """
    _validate(reference, reference_call, given, dtype, seed, sets)
    signature = Signature.of(reference, reference_call)
    fixed = dict(given or {})
    if unknown := set(fixed) - set(signature.parameters):
        expected = ", ".join(signature.parameters)
        raise ValueError(f"given: expected some of {expected}, got {', '.join(sorted(unknown))}")
    told = {name for name in signature.required if name in fixed or row_of(name) or is_mask(name)}
    if untold := [name for name in signature.required if name not in told]:
        raise ValueError("\n".join(map(_untold, untold)))
    sizes = ReferenceSizes(reference)

    def suggested(more: int) -> Given:
        trial = ReferenceTrial(reference, reference_call, dtype, seed + more, signature, fixed)
        arrays, lengths = _needed(trial, sizes, fixed, more)
        return signature.bound(_with_optional(trial, sizes, arrays, lengths))

    return suggested(0) if sets is None else [suggested(more) for more in range(sets)]


def _validate(reference: Any, call: Any, given: Any, dtype: Any, seed: Any, sets: Any) -> None:
    """Raise TypeError or ValueError with every reason why nothing can be suggested."""
    problems = type_problems(reference=reference) + call_problems({"reference_call": call})
    problems += seed_type_problems(seed)
    if sets is not None and not (isinstance(sets, int) and not isinstance(sets, bool)):
        problems.append(f"sets: expected an int, got {sets!r}")
    if not isinstance(given, Mapping | None):
        problems.append(f"given: expected a dict of NumPy arrays by parameter, got {type(given)}")
    else:
        problems += [
            f"given[{name!r}]: expected a NumPy array, got {type(value)}"
            for name, value in (given or {}).items()
            if not isinstance(value, np.ndarray)
        ]
    if problems:
        raise TypeError("\n".join(problems))
    problems = seed_problems(seed) + dtype_problems(reference, dtype)
    problems += [f"sets: expected at least 1, got {sets}"] if sets is not None and sets < 1 else []
    if problems:
        raise ValueError("\n".join(problems))


def _untold(name: str) -> str:
    return (
        f"parameter {name!r}: expected a name that shows its meaning (such as x, query, "
        f"input_ids, attention_mask), or an array in given={{{name!r}: array}}; set flags and "
        "other values that are not arrays in reference_call"
    )


# --- required parameters --------------------------------------------------------------------------


def _forms(
    sizes: ReferenceSizes, signature: Signature, fixed: Arrays, more: int
) -> Iterator[Lengths]:
    """Yield lengths of the axes, the most revealing first.

    more: by how much an axis is longer than its usual length, if nothing says how long it is.
    """
    heads, image = sizes.first("heads", 1), sizes.first("image", 0)
    head_dim = sizes.first("head_dim", sizes.first("width", 24) // heads)
    others = {"N": heads, "H": head_dim, "Y": image or 17 + more, "X": image or 14 + more}
    others |= {"C": sizes.first("channels", 3), "F": sizes.first("features", 5)}
    others |= {"P": (image // sizes.first("patch", 1)) ** 2}
    of_fixed = dict(_letters(sizes, fixed))
    beside_a_decoder = any(name.startswith("decoder_") for name in signature.parameters)
    for T in sizes.lengths():
        B = other_prime(3, sizes.taken | {T})
        least = sizes.reach or max(T // 2, 5)
        # A mask of fewer samples than a waveform has would be taken for one of a shorter waveform.
        of_others = () if sizes.of_waveforms else (other_prime(least, sizes.taken | {B, T}),)
        for S in (*of_others, T):
            free = {"B": B + more, "T": T + more, "S": S + more}
            lengths = {**others, **free, **of_fixed}
            lengths["E"] = lengths["S" if beside_a_decoder else "T"]
            yield {**lengths, "M": lengths["B"] * heads}


def _letters(sizes: ReferenceSizes, fixed: Arrays) -> Iterator[tuple[str, int]]:
    """Yield the lengths of axes that follow from the arrays given by the caller."""
    for name, array in fixed.items():
        fitting = [c for c in choices_of(name, sizes) if len(c.axes) == array.ndim]
        for pairs in [zip(choice.axes, array.shape, strict=True) for choice in fitting[:1]]:
            yield from (("T" if x == "E" else x, n) for x, n in pairs if isinstance(x, str))


def _needed(
    trial: ReferenceTrial, sizes: ReferenceSizes, fixed: Arrays, more: int
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Make arrays for parameters that have no default, or that the reference needs nevertheless.

    Returns the arrays and the lengths of the axes. Raises ValueError if the reference refuses all.
    """
    required = [name for name in trial.signature.required if name not in fixed]
    others = [name for name in trial.signature.parameters if name not in (*required, *fixed)]
    asked = [name for name in others if may_be_asked_for(name)]

    def candidates() -> Iterator[tuple[dict[str, np.ndarray], Lengths]]:
        sets = [c for n in range(min(len(asked), 3) + 1) for c in itertools.combinations(asked, n)]
        for lengths, extra in itertools.product(_forms(sizes, trial.signature, fixed, more), sets):
            names = [*required, *extra]
            tried = [list(_arrays(trial, sizes, name, lengths)) for name in names]
            for arrays in itertools.product(*tried):
                yield {**fixed, **dict(zip(names, arrays, strict=True))}, lengths

    for arrays, lengths in itertools.islice(candidates(), _TRIALS):
        if (outputs := trial.outputs(arrays)) is not None:
            # The model may have other tokens inside: patches, and one more for the class.
            inside = [x.shape[1] for x in outputs.values() if x.ndim == 3]
            return arrays, {**lengths, "L": inside[0] if inside else lengths["T"]}
    refusals = "; ".join(list(dict.fromkeys(trial.refusals))[:3])
    given = ", ".join(f"{name} {a.dtype.name}{list(a.shape)}" for name, a in fixed.items())
    beside = f" with {given}, as given" if given else ""
    made = f"inputs made for {joined(required + asked)}" if required + asked else "no other inputs"
    left = [name for name in others if name not in asked]
    omitted = f" Optional parameters that were left out: {joined(left)}." if left else ""
    raise ValueError(
        f"reference: expected it to run on {made}{beside}, but it raised on all "
        f"{len(trial.refusals)} that were tried. The first errors: {refusals}.{omitted} Pass the "
        "arrays it needs as given={name: array}, or use a reference_call, or a module around it, "
        "that makes the rest"
    )


def _arrays(
    trial: ReferenceTrial, sizes: ReferenceSizes, name: str, lengths: Lengths
) -> Iterator[np.ndarray]:
    """Yield every array that may be passed for a parameter."""
    if choices := choices_of(name, sizes):
        drawn = (trial.draw(name, choice, lengths) for choice in choices)
        yield from (array for array in drawn if array is not None)
    elif is_mask(name):
        for form in mask_forms(name, lengths):
            yield trial.mask(name, form)


# --- optional parameters --------------------------------------------------------------------------


def _with_optional(
    trial: ReferenceTrial, sizes: ReferenceSizes, arrays: dict[str, np.ndarray], lengths: Lengths
) -> dict[str, np.ndarray]:
    """Add optional parameters one by one: the first array that runs and changes an output.

    Then try pairs of those refused, since queries and keys, for example, may both need positions.
    """
    refused: list[str] = []
    for name in trial.signature.parameters:
        if is_mask(name):
            arrays = _with_mask(trial, name, arrays, lengths)
        elif name not in arrays:
            tried = ({**arrays, name: x} for x in _arrays(trial, sizes, name, lengths))
            changed = next((x for x in tried if trial.changes(arrays, x)), None)
            if changed and is_position(name) and not _counts_itself(trial, name, arrays, changed):
                continue  # left out, so that the positions that the reference computes are run
            arrays, refused = changed or arrays, refused + [name] * (changed is None)
    for names in itertools.combinations(refused, 2):
        first = [next(_arrays(trial, sizes, name, lengths), None) for name in names]
        both = {name: x for name, x in zip(names, first, strict=True) if x is not None}
        if len(both) == 2 and trial.changes(arrays, {**arrays, **both}):
            return {**arrays, **both}
    return arrays


def _counts_itself(
    trial: ReferenceTrial, name: str, without: dict[str, np.ndarray], given: dict[str, np.ndarray]
) -> bool:
    """Return whether positions, if left out, default to 0, 1, 2, … in each row, as in any port."""
    in_order = np.broadcast_to(np.arange(given[name].shape[-1]), given[name].shape)
    return not trial.changes(without, {**without, name: in_order})


def _with_mask(
    trial: ReferenceTrial, name: str, arrays: dict[str, np.ndarray], lengths: Lengths
) -> dict[str, np.ndarray]:
    """Add the first mask that hides keys from a softmax; failing that, one that changes an output.

    A probe with one hidden key shows whether True shows or hides: its opposite hides all others.
    """
    if name in trial.fixed:
        return arrays
    changing: list[MaskForm] = []
    for form in mask_forms(name, lengths):
        both = [form, replace(form, true_shows=False)]
        probes = [{**arrays, name: trial.probe(one)} for one in both]
        runs = [trial.outputs(probe) is not None for probe in probes]
        if not any(runs):
            continue
        if all(runs) and not trial.changes(*probes):
            return arrays  # the reference does not use this parameter
        hidden = [
            trial.weightless_keys(p) if ran else None for p, ran in zip(probes, runs, strict=True)
        ]
        fewest = min(count for count in hidden if count is not None)
        if fewest and hidden[0] != hidden[1]:
            return _with_form(trial, name, arrays, both[hidden.index(fewest)])
        if form.dtype != ADDED:
            changing.append(form)
    return _with_form(trial, name, arrays, changing[0]) if changing else arrays


def _with_form(
    trial: ReferenceTrial, name: str, arrays: dict[str, np.ndarray], form: MaskForm
) -> dict[str, np.ndarray]:
    """Add a mask, with an empty row if the reference stays finite and accurate on it."""
    masks = [trial.mask(name, form, empty=True), trial.mask(name, form), trial.probe(form)]
    tried = [{**arrays, name: mask} for mask in masks]
    runs = (one for one in tried if trial.outputs(one) is not None)
    return next((one for one in runs if one is not tried[0] or trial.is_accurate(one)), arrays)
