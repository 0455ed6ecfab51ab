"""Cut a calibration down to what the README's figures are made from.

    jax-attn verify --calibrate --report DIR
    python parity_tests/evidence/calibration.py DIR/calibration.json

writes profile/calibration.json: environment, figures, and the configurations that do not pass.
"""

import json
import sys
from pathlib import Path

WHOLE = ("configurations", "columns")

if __name__ == "__main__":
    document = json.loads(Path(sys.argv[1]).read_text())
    kept = {name: value for name, value in document.items() if name not in WHOLE}
    text = json.dumps(kept, separators=(",", ":")).replace('},{"', '},\n{"')
    Path(__file__).parent.joinpath("profile", "calibration.json").write_text(text + "\n")
