"""Which line of the reference is being run."""

import os
import sys
from pathlib import Path

import torch

# With the separator: torchvision is no part of torch.
_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)


def calling_line() -> str:
    """Where the reference calls the operator that is met now: its file and line."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
