"""Make the pair that a user's function returns; every process of a run makes its own."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from jax_attn.bench.pair.checkpoint import pair_of_checkpoint
from jax_attn.bench.pair.pair import TimedPair
from jax_attn.parity.checking.arguments import call_problems, type_problems
from jax_attn.parity.pair.errors import PairError
from jax_attn.parity.pair.pair import Pair, TrainingPair
from jax_attn.parity.pair.read import called, function, pair_of, takes
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.transfer.kinds.held import as_call, as_module


def made(named: str | TimedPair, lengths: tuple[int, ...] = ()) -> TimedPair:
    """Make the pair that `named` stands for. Raises PairError.

    named: `FILE.py:FUNCTION` or `package.module:FUNCTION`, which is called; a checkpoint's folder
    or file, whose model is built in both frameworks; or a pair, which is returned as it is.
    lengths: the lengths of the inputs; a function takes each as its argument `length`.
    """
    if isinstance(named, TimedPair):
        return named
    if Path(named).exists() and not named.endswith(".py"):
        return pair_of_checkpoint(Path(named), lengths)
    make = function(named)
    if lengths and not takes(make, "length"):
        raise PairError(f"{named}: expected an argument `length`, which --lengths gives, got none")
    arguments: list[dict[str, int]] = [{"length": length} for length in lengths] or [{}]
    pairs = []
    for given in arguments:
        pair = pair_of(named, called(named, make, **given))
        if isinstance(pair, TrainingPair):
            raise PairError(f"{named}: expected a pair to call, got a TrainingPair")
        pairs.append(timed(named, pair))
    inputs = (pair.inputs for pair in pairs)
    return replace(pairs[0], by_length=dict(zip(lengths, inputs, strict=False)))


def timed(where: str, pair: Pair, problems: Sequence[str] = ()) -> TimedPair:
    """Return the pair as it is timed. Raises PairError with all that is wrong, and `problems`."""
    if problems := [*_problems(pair), *problems]:
        raise PairError("\n".join([f"{where}: this pair cannot be timed", *problems]))
    port, port_call = as_module(pair.port), as_call(pair.port, pair.port_call)
    given = {f.name: getattr(pair, f.name) for f in fields(pair)}
    return TimedPair(**given | {"port": port, "port_call": port_call})


def _problems(pair: Pair) -> Iterator[str]:
    sides = {"reference": pair.reference, "port": pair.port, "layout": pair.layout}
    yield from type_problems(**{k: v for k, v in sides.items() if k != "layout" or v is not None})
    yield from call_problems({"reference_call": pair.reference_call, "port_call": pair.port_call})
    try:
        Inputs.of(pair.inputs, np.dtype(np.float64))  # what both sides receive is not changed
    except TypeError as error:
        yield from str(error).split("\n")
    if pair.mesh is not None:
        yield f"mesh: expected None, because a pair is timed on one device, got {pair.mesh}"
