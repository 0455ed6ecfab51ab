"""Verify a whole model that `jax_attn.models` does not have: translate it, and compare that."""

import shlex
from dataclasses import replace
from pathlib import Path

from jax_attn.parity.judge.finding import findings
from jax_attn.parity.judge.result import Result
from jax_attn.translate.checkpoint import model_of, translate_any_size
from jax_attn.translate.proof import prove

NAME = "translation, float32"


def verify_translated(path: Path, *, explain: bool = False) -> Result:
    """Translate the model of a checkpoint, and compare outputs and every gradient.

    explain: add an explanation to a result that does not pass. Raises TransferError and MemoryError
    if the model cannot be read, and TranslationError if it cannot be translated.
    """
    model = model_of(path)
    varied = translate_any_size(model.module, model.inputs)
    result = prove(varied.translation, model.module, model.inputs, dynamic=varied.dynamic or None)
    kind = type(model.module)
    notes = (
        f"jax_attn.models does not support this model, so its translation was verified, whole, "
        f"against {kind.__module__.partition('.')[0]}'s {kind.__name__}; to write it: "
        f"jax-attn translate {shlex.quote(str(path))} OUT",
        *model.notes,
        *varied.notes,
    )
    about = findings("about-checkpoint", notes)
    result = result.explained() if explain else replace(result, explainer=None)
    return replace(result, name=NAME, notes=(*about, *result.notes))
