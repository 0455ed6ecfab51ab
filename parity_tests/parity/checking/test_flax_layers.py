"""flax's own layers pass against torch's, in each dtype that both run on the CPU."""

import pytest

from helpers.parity.findings import kinds
from helpers.parity.flax_layers import ROWS
from jax_attn.parity import Verdict, check

pytestmark = pytest.mark.slow
CASES = [(name, dtype) for name, pair in ROWS.items() for dtype in pair.dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_flaxs_own_layer_passes_with_standing_notes_alone(name, dtype):
    pair = ROWS[name]
    reference, port = pair.made(dtype)
    result = check(
        reference,
        port,
        pair.inputs(),
        layout=pair.layout,
        port_call=pair.call,
        dtype=dtype,
        transforms=("jit",),
    )
    assert result.verdict is Verdict.PASS, str(result)
    assert {*kinds(result, "note")} <= {"weights-not-compared", "weights-skipped"}, str(result)
