"""Make inputs on which a wrong port would show: from the reference's signature, sizes and runs.

Nothing is known of any family: a table says what a parameter may be given by its name
(`input_table`), the sizes are read (`reference_sizes`), and the reference is run on each choice.
What it refuses, or what makes it not finite, is replaced by the next simpler choice.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

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
from jax_attn.parity.checking.suggestion.reference_sizes import ReferenceSizes, other_primes
from jax_attn.parity.checking.suggestion.trials import Signature, Trial
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.inputs_and_runs import Arrays

_TRIALS = 2000
"""Runs that the reference may refuse before its first: a signature of many unknown widths."""


def suggest_inputs(
    reference: torch.nn.Module,
    *,
    reference_call: Callable[..., Any] | None = None,
    given: Mapping[str, np.ndarray] | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, np.ndarray] | tuple[np.ndarray, ...]:
    """Make inputs for `check` that reveal what ports usually get wrong.

    B is at least 3. B, T and, where keys may come from elsewhere, S are distinct primes that equal
    neither the number of heads nor a width. T is longer than every window, distance and number of
    buckets that the config or an attribute with such a name has, if that is at most 300; a window
    beyond that never takes effect, and `check` can only doubt it. Floats are standard normal. Ids
    are drawn over the whole vocabulary, with `padding_idx` among them once, and a config's
    `eos_token_id` twice in each row, at two thirds of it and at its end; token types take all their
    values; positions are in no order. Masks hide one key of the first row and several of each other
    row, and, where the reference stays finite and accurate forward and backward, all keys of the
    last row. Left out are optional parameters that change no output or whose name no rule knows,
    and positions that the reference itself computes as something other than 0, 1, 2, …, for example
    from the padding.

    Args:
      reference: the torch module, with its weights in place and in `dtype`. A copy is run.
      reference_call: as for `check`. Arrays are made for its parameters after the module, by name;
        where it takes only `**inputs`, for the parameters of the module.
      given: fixed arrays, by parameter; the others are made to fit them. Use it for a parameter
        that no rule knows, or one whose values mean something.
      dtype: the dtype of the reference.
      seed: the same seed makes the same arrays.

    Returns:
      A dict of arrays by parameter, or a tuple where the parameters have no names.

    Raises:
      ValueError: a parameter without a default that no rule knows, each of them named; or what the
        reference refused.
    """
    _validate(reference, reference_call, given, dtype, seed)
    signature = Signature.of(reference, reference_call)
    fixed = dict(given or {})
    if unknown := set(fixed) - set(signature.parameters):
        expected = ", ".join(signature.parameters)
        raise ValueError(f"given: expected some of {expected}, got {', '.join(sorted(unknown))}")
    told = {name for name in signature.required if name in fixed or row_of(name) or is_mask(name)}
    if untold := [name for name in signature.required if name not in told]:
        raise ValueError("\n".join(map(_untold, untold)))
    sizes, trial = (
        ReferenceSizes(reference),
        Trial(reference, reference_call, dtype, seed, signature, fixed),
    )
    arrays, lengths = _needed(trial, sizes, fixed)
    return signature.bound(_with_optional(trial, sizes, arrays, lengths))


def _validate(reference: Any, call: Any, given: Any, dtype: Any, seed: Any) -> None:
    """Every reason why nothing can be suggested, at once."""
    problems = type_problems(reference) + call_problems({"reference_call": call})
    problems += seed_type_problems(seed)
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
    if problems := seed_problems(seed) + dtype_problems(reference, dtype):
        raise ValueError("\n".join(problems))


def _untold(name: str) -> str:
    return (
        f"parameter {name!r}: expected a name that tells what it holds (such as x, query, "
        f"input_ids, attention_mask), or an array in given={{{name!r}: array}}; a flag or what is "
        "no array belongs in reference_call"
    )


# --- what is needed -------------------------------------------------------------------------------


def _forms(sizes: ReferenceSizes, signature: Signature, fixed: Arrays) -> Iterator[Lengths]:
    """Lengths of axes, those that reveal most first."""
    heads, image = sizes.first("heads", 1), sizes.first("image", 0)
    head_dim = sizes.first("head_dim", sizes.first("width", 24) // heads)
    others = {"N": heads, "H": head_dim, "Y": image or 17, "X": image or 13}
    others |= {"C": sizes.first("channels", 3), "F": sizes.first("features", 5)}
    others |= {"P": (image // sizes.first("patch", 1)) ** 2}
    of_fixed = dict(_letters(sizes, fixed))
    beside_a_decoder = any(name.startswith("decoder_") for name in signature.parameters)
    for T in sizes.lengths():
        B = other_primes(sizes.taken | {T}, 3, 1)[0]
        least = sizes.reach or max(T // 2, 5)
        for S in (other_primes(sizes.taken | {B, T}, least, 1)[0], T):
            lengths = {**others, "B": B, "T": T, "S": S, **of_fixed}
            lengths["E"] = lengths["S" if beside_a_decoder else "T"]
            yield {**lengths, "M": lengths["B"] * heads}


def _letters(sizes: ReferenceSizes, fixed: Arrays) -> Iterator[tuple[str, int]]:
    """What the arrays that are given say of the axes."""
    for name, array in fixed.items():
        fitting = [c for c in choices_of(name, sizes) if len(c.axes) == array.ndim]
        for pairs in [zip(choice.axes, array.shape, strict=True) for choice in fitting[:1]]:
            yield from (("T" if x == "E" else x, n) for x, n in pairs if isinstance(x, str))


def _needed(
    trial: Trial, sizes: ReferenceSizes, fixed: Arrays
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Arrays for what has no default, and for what the reference asks for nevertheless."""
    required = [name for name in trial.signature.required if name not in fixed]
    others = [name for name in trial.signature.parameters if name not in (*required, *fixed)]
    asked = [name for name in others if may_be_asked_for(name)]

    def candidates() -> Iterator[tuple[dict[str, np.ndarray], Lengths]]:
        sets = [c for n in range(min(len(asked), 3) + 1) for c in itertools.combinations(asked, n)]
        for lengths, extra in itertools.product(_forms(sizes, trial.signature, fixed), sets):
            names = [*required, *extra]
            tried = [list(_arrays(trial, sizes, name, lengths)) for name in names]
            for arrays in itertools.product(*tried):
                yield {**fixed, **dict(zip(names, arrays, strict=True))}, lengths

    for arrays, lengths in itertools.islice(candidates(), _TRIALS):
        if (outputs := trial.outputs(arrays)) is not None:
            # Inside, there may be other tokens than outside: patches, and one more for the class.
            inside = [x.shape[1] for x in outputs.values() if x.ndim == 3]
            return arrays, {**lengths, "L": inside[0] if inside else lengths["T"]}
    refusals = "; ".join(list(dict.fromkeys(trial.refusals))[:3])
    given = ", ".join(f"{name} {a.dtype.name}{list(a.shape)}" for name, a in fixed.items())
    beside = f" beside {given}, as given" if given else ""
    made = f"inputs made for {joined(required + asked)}" if required + asked else "no other inputs"
    left = [name for name in others if name not in asked]
    omitted = f" Optional parameters that were left out: {joined(left)}." if left else ""
    raise ValueError(
        f"reference: expected it to run on {made}{beside}, but it refused all "
        f"{len(trial.refusals)} that were tried. The first errors: {refusals}.{omitted} Give what "
        "it needs by given={name: array}, or wrap it in a module, or a reference_call, that makes "
        "the rest"
    )


def _arrays(
    trial: Trial, sizes: ReferenceSizes, name: str, lengths: Lengths
) -> Iterator[np.ndarray]:
    """Every array that a parameter may be given."""
    if choices := choices_of(name, sizes):
        drawn = (trial.draw(name, choice, lengths) for choice in choices)
        yield from (array for array in drawn if array is not None)
    elif is_mask(name):
        for form in mask_forms(name, lengths):
            yield trial.mask(name, form)


# --- what is optional -----------------------------------------------------------------------------


def _with_optional(
    trial: Trial, sizes: ReferenceSizes, arrays: dict[str, np.ndarray], lengths: Lengths
) -> dict[str, np.ndarray]:
    """One parameter after the other: its first array that runs and that changes an output.

    Then two at once of those that were refused, as where queries and keys need positions both.
    """
    refused: list[str] = []
    for name in trial.signature.parameters:
        if is_mask(name):
            arrays = _with_mask(trial, name, arrays, lengths)
        elif name not in arrays:
            tried = ({**arrays, name: x} for x in _arrays(trial, sizes, name, lengths))
            changed = next((x for x in tried if trial.changes(arrays, x)), None)
            if changed and is_position(name) and not _counts_itself(trial, name, arrays, changed):
                continue  # left out, so that what the reference computes instead is run
            arrays, refused = changed or arrays, refused + [name] * (changed is None)
    for names in itertools.combinations(refused, 2):
        first = [next(_arrays(trial, sizes, name, lengths), None) for name in names]
        both = {name: x for name, x in zip(names, first, strict=True) if x is not None}
        if len(both) == 2 and trial.changes(arrays, {**arrays, **both}):
            return {**arrays, **both}
    return arrays


def _counts_itself(
    trial: Trial, name: str, without: dict[str, np.ndarray], given: dict[str, np.ndarray]
) -> bool:
    """Whether positions that are left out are 0, 1, 2, … in each row, which any port has right."""
    in_order = np.broadcast_to(np.arange(given[name].shape[-1]), given[name].shape)
    return not trial.changes(without, {**without, name: in_order})


def _with_mask(
    trial: Trial, name: str, arrays: dict[str, np.ndarray], lengths: Lengths
) -> dict[str, np.ndarray]:
    """The first mask that hides keys from a softmax; where none does, that changes an output.

    Whether True shows or hides is told by a probe of one hidden key: its opposite hides all others.
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
            return arrays  # a parameter that is not looked at
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
    trial: Trial, name: str, arrays: dict[str, np.ndarray], form: MaskForm
) -> dict[str, np.ndarray]:
    """With a row of which all is hidden, where the reference stays finite and accurate."""
    masks = [trial.mask(name, form, empty=True), trial.mask(name, form), trial.probe(form)]
    tried = [{**arrays, name: mask} for mask in masks]
    runs = (one for one in tried if trial.outputs(one) is not None)
    return next((one for one in runs if one is not tried[0] or trial.is_accurate(one)), arrays)
