"""Ports by others, checked against torch: `python -m gallery`, from parity_tests/."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "parity_tests" / "evidence" / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
