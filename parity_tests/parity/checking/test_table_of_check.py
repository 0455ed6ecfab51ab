"""Parameters of the reference that no row of the table names: told in one line, or passed over."""

import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from jax_attn.parity import Verdict, check
from jax_attn.transfer import LAYOUTS, LINEAR, Layout, ignored, load, row

D, F = 5, 3


class TorchSide(torch.nn.Module):
    """Its adapters, one a layer, take no part."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(D, F)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(4))

    def forward(self, x):
        return self.lin(x)


class FlaxSide(nnx.Module):
    def __init__(self, use_bias=True):
        self.lin = nnx.Linear(D, F, use_bias=use_bias, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.lin(x)


ROWS = LINEAR.under("lin", "lin")
WEIGHTS, BIASES = (
    ignored(f"layers.{{i}}.{name}", "no part of the port") for name in ("weight", "bias")
)
IN_NO_ROW = (
    "weights: the reference's `layers.0.weight`, `layers.0.bias`, `layers.1.weight` and 5 more are "
    'in no row of the table: add rows, or skip them with ignored("layers.{i}.weight", "why") '
    'and ignored("layers.{i}.bias", "why")'
)
# the table, whether the port has biases -> the failures, or the one note that counts.
TABLES = {
    "in no row": (Layout(ROWS), True, [IN_NO_ROW]),
    "passed over": (
        Layout(ROWS, WEIGHTS, BIASES),
        True,
        "the table skips `layers.0.bias`, `layers.0.weight`, `layers.1.bias`, "
        "`layers.1.weight`, `layers.2.bias`, `layers.2.weight`, `layers.3.bias` and "
        "`layers.3.weight` of the reference: neither these parameters nor their gradients were "
        "compared",
    ),
    "three of a kind": (
        Layout(ROWS, WEIGHTS, *(ignored(f"layers.{i}.bias", "no part") for i in range(3))),
        True,
        [
            "weights: the reference's `layers.3.bias` is in no row of the table: add rows, or skip "
            'it with ignored("layers.3.bias", "why")'
        ],
    ),
    "a row, and nothing there": (
        Layout(ROWS, WEIGHTS, BIASES),
        False,
        ["weights: the reference has `lin.bias`, but the port has no counterpart"],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_parameters_that_the_port_has_not(name):
    layout, use_bias, said = TABLES[name]
    reference, port = TorchSide(), FlaxSide(use_bias)
    carried = {k: a for k, a in reference.lin.state_dict().items() if use_bias or k == "weight"}
    load(port.lin, carried, LINEAR)
    x = np.random.default_rng(0).standard_normal((2, D))
    result = check(reference, port, (x,), layout=layout, transforms=("eager",))
    if isinstance(said, list):
        assert result.verdict is Verdict.FAIL
        assert sentences(result, "weights-differ") == list(result.failures) == said
        return
    assert result.verdict is Verdict.PASS, str(result)
    assert kinds(result, "note") == ["weights-skipped"]
    assert sentences(result, "weights-skipped") == [said]
    assert "grad lin.weight" in {t.label for t in result.tensors}


OPTIONAL = {"bias_k", "bias_v", "q_norm", "k_norm", "position_bias", "sinks"}
# rows beside those of the module -> those that match nothing; built-in tables serve many modules
BESIDE = {
    "a spelling mistake on both sides": (row("lin.wait", "lin.colonel"), True),
    "a layer that neither side has": (row("layers.{i}.up.weight", "layers.{i}.up.kernel"), True),
    "a bias that neither side has": (row("up.bias", "up.bias"), False),
    "parts of a built-in table": (LAYOUTS["gqa"].under("attn", "attn"), False),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_row_that_matches_nothing_on_either_side_is_named(name):
    beside, is_named = BESIDE[name]
    if isinstance(beside, Layout):
        optional = [group for group in beside.groups if all(r.is_optional for r in group.rows)]
        assert {
            path.split(".")[1] for g in optional for r in g.rows for path in r.paths
        } == OPTIONAL
        beside = Layout(*optional)
    layout = Layout(LINEAR, beside)
    reference, port = torch.nn.Linear(D, F), nnx.Linear(D, F, rngs=nnx.Rngs(0))
    planned = load(port, reference.state_dict(), layout)
    assert planned.unused == [beside] * is_named
    assert str(planned).count("matches nothing on either side") == is_named
    x = np.random.default_rng(0).standard_normal((2, D))
    result = check(reference, port, (x,), layout=layout, transforms=("eager",))
    assert result.verdict is Verdict.PASS
    note = f"nothing on either side matches the table's {beside!r}"
    assert sentences(result, "row-unused") == [note] * is_named
    assert kinds(result, "note") == []
