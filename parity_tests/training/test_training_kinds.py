"""check_training on ports of every kind: right ones pass, and one of a wrong scale fails."""

import numpy as np
import pytest
import torch

from helpers.parity import five_kinds
from jax_attn import parity
from jax_attn.parity import Verdict

REFERENCE = five_kinds.reference()


def check(kind: str, bug: str = "", **changed) -> parity.Result:
    (x,) = five_kinds.inputs()
    batches = [{"x": x, "target": np.flip(x, axis).copy()} for axis in (0, 1)]
    options = {
        "layout": five_kinds.KINDS[kind].layout,
        "optimizer": lambda module: torch.optim.AdamW(module.parameters(), 0.01),
        "loss": "mse",
        "steps": 3,
    }
    port = five_kinds.port(kind, REFERENCE, bug)
    return parity.check_training(REFERENCE, port, batches, **(options | changed))


@pytest.mark.slow
@pytest.mark.parametrize("kind", five_kinds.KINDS)
def test_a_right_port_trains_as_torch_does(kind):
    result = check(kind)
    assert result.verdict is Verdict.PASS, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equinox", "keras"])
def test_a_wrong_port_fails_by_its_gradients(kind):
    def call(port, x):
        return 1.01 * port(x)

    result = check(kind, port_call=call)
    assert result.verdict is Verdict.FAIL
    assert "gradient" in {t.kind.split()[0] for t in result.tensors if t.verdict is Verdict.FAIL}


def test_an_unbound_linen_module_is_refused():
    with pytest.raises(TypeError, match="without its variables"):
        parity.check_training(
            REFERENCE,
            five_kinds.LinenBlock(""),
            [],
            layout=five_kinds.KINDS["linen"].layout,
            optimizer=torch.optim.SGD,
            loss="mse",
        )
