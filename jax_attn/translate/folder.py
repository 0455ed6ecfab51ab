"""Write the folder of a translation: its source, its weights, how to call it, and the report.

model.py              the source
weights.safetensors   the arrays of the module by dotted path; constants of the source are not among
                      them
README.md             how to load and call it, and the verdict, or what a partial one lacks
report.md             the report of its check, if there is one

It is written whole, or not at all.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jax_attn.parity.judge.result import Result
from jax_attn.transfer import TransferError, as_numpy, save_checkpoint
from jax_attn.transfer.files.port_folder import refused_target
from jax_attn.transfer.files.staging import staged
from jax_attn.transfer.nnx.variables import carried
from jax_attn.translate.tracing.problems import Unsupported
from jax_attn.translate.translation import Translation

_README = """\
# {name}

`model.py` was written by `jax-attn translate`. It computes in JAX what the torch module
`{reference}` computes, and imports jax and flax alone. It is yours to change.

{training}

```python
import jax.numpy as jnp
from flax import nnx
from model import {name}
from safetensors.flax import load_file

module = {name}(rngs=nnx.Rngs(0))
variables = {{".".join(map(str, path)): value for path, value in nnx.iter_graph(module)}}
for key, array in load_file("weights.safetensors").items():
    variables[key][...] = array
outputs = module({call})
```

{sizes}{verdict}
"""

_TRAINING = """\
The module is made in eval mode. `module.train()` turns on what torch's module does in training
mode only, such as dropout, and `module.eval()` turns it off."""

_UNTRAINED = """\
Only eval mode is translated. `module.train()` turns on dropout layers and the batch statistics of
`nn.BatchNorm`; whatever else torch's module does in training mode only is missing:

{reasons}"""

_VERDICT = """\
`report.md` compares outputs and gradients with torch's, in float32:

    {verdict}"""

_MISSING = """\
It is not complete, and nothing was compared: `model.py` calls `not_translated`, which raises, in
place of the operators listed here. Write there what torch computes.

{missing}"""


def expect_new(folder: Path) -> None:
    """Raise TransferError unless a folder of this name can be written."""
    if problems := refused_target(folder):
        raise TransferError("translation, nothing written", problems)


def write(
    folder: Path,
    translation: Translation,
    port: nnx.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    result: Result | None,
    *,
    reference: str,
    sizes: Mapping[str, Mapping[int, str]] | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write the folder, which must not exist: whole, or not at all.

    Args:
      folder: where to write.
      translation: what `translate` returned.
      port: the module with its weights.
      inputs: what the reference is called with; the README makes arrays of their shapes and dtypes.
      result: what `prove` returned; None for a partial translation, of which nothing is proved.
      reference: the reference's class, as the README names it.
      sizes: the axes whose sizes vary, as for `translate`.
      files: further files, by name.

    Raises TransferError if the folder exists or the disk refuses.
    """
    expect_new(folder)
    readme = _README.format(
        name=translation.name,
        reference=reference,
        call=_call(inputs),
        training=_training(translation),
        sizes=_sizes(sizes or {}),
        verdict=_MISSING.format(missing="\n".join(map(_listed, translation.unsupported)))
        if result is None
        else _VERDICT.format(verdict=f"{result.verdict}: {result.gist}"),
    )
    arrays = {name: as_numpy(array) for name, array in carried(port, translation.layout).items()}
    arrays |= translation.tables
    with staged(folder) as partial:
        save_checkpoint(partial / "weights.safetensors", arrays)
        for name, text in {
            "model.py": translation.source,
            "README.md": readme,
            **(files or {}),
        }.items():
            (partial / name).write_text(text, "utf-8")


def _listed(problem: Unsupported) -> str:
    place = f" at {Path(problem.file).name}:{problem.line}: `{problem.text}`" * bool(problem.file)
    return f"- `{problem.operator}`{place}: {problem.reason}"


def _training(translation: Translation) -> str:
    """Say what `train()` does."""
    reasons = "\n".join(map(_listed, translation.untrained))
    return _UNTRAINED.format(reasons=reasons) if reasons else _TRAINING


def _call(inputs: Mapping[str, Any] | tuple[Any, ...]) -> str:
    """Write the arguments of a call, as arrays of ones."""
    if isinstance(inputs, tuple):
        return ", ".join(map(_ones, inputs))
    return ", ".join(f"{name}={_ones(value)}" for name, value in inputs.items())


def _ones(value: Any) -> str:
    array: np.ndarray = as_numpy(value)
    # JAX holds 64 bits as 32 unless it is told otherwise.
    dtype = array.dtype.name.replace("64", "32")
    return f'jnp.ones({array.shape}, "{dtype}")'


def _sizes(sizes: Mapping[str, Mapping[int, str]]) -> str:
    """Say which axes vary."""
    named = [
        f"axis {axis} of `{name}` is {size}"
        for name, axes in sizes.items()
        for axis, size in axes.items()
    ]
    return f"These sizes may be others: {', '.join(named)}.\n\n" if named else ""
