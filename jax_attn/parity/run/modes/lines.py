"""Find the line of the reference that is running."""

import os
import sys
from pathlib import Path

import torch

# With the separator, because torchvision is not part of torch.
_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)


def calling_line() -> str:
    """Return the file and line where the reference calls the current operator."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
