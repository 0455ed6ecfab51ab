"""Loading of `jax-attn port --to flax` output into any NNX module."""

from pathlib import Path
from typing import Any

from flax import nnx

from jax_attn.transfer.files.port_folder import read_again, side_of
from jax_attn.transfer.nnx.load import Plan, flatten, load
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import row


def load_flax(module: nnx.Module, folder: str | Path) -> Plan:
    """Write the arrays of a folder into an NNX module: every nnx.Param, or nothing.

    Like `load`, but names and shapes are already the module's, not torch's.

    Args:
      module: the nnx.Module to write into; an abstract one becomes a real one.
      folder: the output of `jax-attn port --to flax`.

    Returns:
      The `Plan` that was carried out.

    Raises:
      TransferError: every path that differs between the folder and the module, in name, shape or
        dtype. The module is then unchanged.
    """
    folder = Path(folder)
    if side_of(folder) == "torch":
        text = "expected the Flax side of a checkpoint, got the torch side"
        hint = "use transfer.load and a table"
        raise TransferError("load_flax", [Problem("refused", str(folder), text, hint)])
    tensors: Any = read_again(folder)
    same = Layout(*(row(path, path) for path in flatten(module)))
    if hasattr(tensors, "__enter__"):
        with tensors:
            return load(module, tensors, same)
    return load(module, tensors, same)
