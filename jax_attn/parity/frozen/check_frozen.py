"""Check a user's file by a golden reference, in two processes: one runs it, and this one judges."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jax_attn.parity.checking.fixed import expect_none, fixed_problems
from jax_attn.parity.checking.judged import judged
from jax_attn.parity.checking.probes import PortSide
from jax_attn.parity.frozen.frozen_port import FrozenPort, FrozenWeights, made
from jax_attn.parity.frozen.port_side import PortProcess
from jax_attn.parity.frozen.unanswered import Unanswered
from jax_attn.parity.golden.codec import fields_of
from jax_attn.parity.golden.folder import read
from jax_attn.parity.golden.golden import Golden, decoded
from jax_attn.parity.judge.result import Result
from jax_attn.parity.pair.errors import PairError, refusal
from jax_attn.parity.pair.pair import FIXED
from jax_attn.parity.run.inputs_and_runs import RaisedError


class Frozen(NamedTuple):
    """The result of a check in two processes.

    jax_part: `environment.of_jax` of the port's process. files: the user's files that it imported.
    """

    result: Result
    jax_part: dict[str, Any]
    files: frozenset[Path]


def check_frozen(
    named: str, folder: Path, digest: str, options: Mapping[str, Any], seconds: float
) -> Frozen:
    """Judge the port that `FILE.py:FUNCTION` makes by a golden reference.

    The file runs in a process of its own. It receives the inputs and cotangents, and hands back
    arrays and words, so whatever it does there, the verdict is this process's. The golden reference
    is read into memory before, and its folder is read again afterwards.

    options: arguments of `check` that win over the file's. seconds: how long the port's answers may
    take, all together.

    Raises ValueError if the folder is not the golden reference of this digest, or if options ask
    for something else than what it was captured with. Raises PairError if the port cannot be
    judged, ends or hangs, or if the golden reference changed meanwhile.
    """
    if os.name != "posix":
        raise PairError(f"--expect-digest: expected a POSIX system, got {sys.platform}")
    golden = decoded(folder, read(folder, digest, in_memory=True))
    expect_none(fixed_problems(golden, **{name: options.get(name) for name in FIXED}))
    with PortProcess(named, seconds) as process:
        frozen = judged_by_answers(process, golden, options)
        process.leave()
    try:
        read(folder, digest)
    except ValueError as error:
        raise PairError(f"the golden reference changed while the port ran\n{error}") from error
    return frozen


def judged_by_answers(process: PortProcess, golden: Golden, options: Mapping[str, Any]) -> Frozen:
    """Judge by what a port's process answers. Raises PairError, TypeError or ValueError."""
    side = Unanswered.of(golden)
    asked = made(process, options, {name: getattr(side, name) for name in fields_of(Unanswered)})
    port = FrozenPort(process, asked)
    weights = None if asked.layout is None else FrozenWeights(process, asked.layout)
    transforms = tuple(options.get("transforms", asked.transforms))
    try:
        result = judged(golden, PortSide.of(golden, port, transforms, weights))
    except (PairError, MemoryError):
        raise
    except RaisedError as error:  # under every transform; its cause has the process's lines
        raise (error.__cause__ or error) from None
    except Exception as error:  # answers that contradict one another
        if refusal(error) is not None:
            raise
        raise process.wrong("what can be judged", error) from error
    result = replace(result, notes=(*port.notes_on_mesh(), *result.notes, *golden.notes))
    strict = options.get("strict", asked.strict)
    files = frozenset(map(Path, port.files()))
    return Frozen(result.strict() if strict else result, asked.jax_part, files)
