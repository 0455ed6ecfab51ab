"""The gallery: two ports that pass and two that fail; the page says what the records hold."""

import numpy as np
import pytest
import torch
from gallery_tables import CAUSES, findings, tables, undecided, verdict, verdicts

from gallery import readings, records
from gallery.by_value import layout_by_value
from gallery.measured import measured
from gallery.port import PACKAGES, Subject
from gallery.ports import every
from helpers import documents
from jax_attn import parity, transfer

PORTS = {port.name: port for port in every()}
FINDINGS = findings()
CHECKED = {
    # name -> its verdict, and words of the explanation
    "flax RMSNorm": ("PASS", None),
    "optax sgd": ("PASS", None),
    "flax LayerNorm, default epsilon": ("FAIL", "an epsilon of 1e-06 in place of 1e-05"),
    "optax adamw, defaults": ("FAIL", "weight_decay=0.0001 in place of 0.01"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_a_port_has_its_verdict_and_its_explanation(name):
    expected, said = CHECKED[name]
    record = measured(PORTS[name])
    assert verdict(record) == expected, str(record)
    assert record.get("explained") is None if said is None else said in record["explained"]


def test_a_port_that_cannot_be_built_says_why():
    def broken(dtype):
        raise KeyError("no such layer")

    port = PORTS["flax RMSNorm"].__class__("broken", "flax", broken)
    record = measured(port)
    assert verdict(record) == "not built"
    assert "no such layer" in record["not built"]


def test_a_check_that_raises_an_error_is_no_port_that_cannot_be_built():
    pair = parity.Pair(torch.nn.Linear(2, 2), None, ())
    port = PORTS["flax RMSNorm"].__class__("raising", "flax", lambda dtype: Subject(pair))
    record = measured(port)
    assert verdict(record) == "ERROR"
    assert "not built" not in record
    assert undecided({"raising": record}).count("raising") == 2  # one in each dtype
    assert verdicts({"raising": record}).endswith("| – |")


def test_every_record_is_of_a_port_of_a_pinned_package():
    kept = records.kept()
    assert {*kept} <= {*PORTS}
    for name, record in kept.items():
        assert record["package"] == PORTS[name].package
        assert record["version"] == PACKAGES[record["package"]][0]


def test_every_failure_was_looked_at_and_every_finding_fails():
    failing = {name for name, each in records.kept().items() if verdict(each) == "FAIL"}
    found = [name for each in FINDINGS for name in each["ports"]]
    assert sorted(found) == sorted(failing)
    assert {each["cause"] for each in FINDINGS} <= {*CAUSES}


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda each: each["repro"])
def test_a_repro_is_short_and_needs_neither_this_package_nor_a_model(finding):
    text = (readings.REPROS / finding["repro"]).read_text()
    assert text.count("\n") <= 25
    assert "jax_attn" not in text
    assert "from_pretrained" not in text


def test_what_is_kept_of_findings_is_what_they_name():
    assert {*records.kept("repros")} == {each["repro"] for each in FINDINGS}
    assert {*records.kept("sources")} == {s for each in FINDINGS for s in each["sources"]}
    assert {path.name for path in readings.REPROS.glob("*.py")} == {*records.kept("repros")}


def test_the_page_names_no_line_of_the_gallery():
    explained = [each.get("explained", "") for each in records.kept().values()]
    assert any("(measured.py:" in sentence for sentence in explained)
    assert "(measured.py:" not in tables()["gallery_findings"]


@pytest.mark.slow
@pytest.mark.parametrize("repro", ["flax_epsilon.py", "optax_rprop.py"])
def test_a_repro_prints_what_was_kept_up_to_figures(repro):
    assert documents.agree(records.kept("repros")[repro], readings.printed(repro))


# --- tables by value --------------------------------------------------------------------------


class Fused(torch.nn.Module):
    """Parts of one matrix, rows of a table, and a matrix whose axes the port splits."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(6, 12), torch.nn.Linear(6, 8)
        self.up, self.down = torch.nn.Linear(5, 3, bias=False), torch.nn.Linear(5, 3, bias=False)


def held(module, *, rounded=False):
    """The same weights as a port may hold them."""
    weights = {name: x.detach().numpy() for name, x in module.named_parameters()}
    if rounded:
        weights = {name: x.astype(np.float16).astype(np.float32) for name, x in weights.items()}
    q, k, v = np.split(weights["qkv.weight"], 3)
    tree = {"q": q.T.reshape(6, 2, 2), "k": k.T.reshape(6, 2, 2), "v": v.T.reshape(6, 2, 2)}
    tree |= {"bias": weights["qkv.bias"], "out": weights["out.weight"].T.reshape(2, 3, 8)}
    tree["experts"] = np.stack([weights["up.weight"].T, weights["down.weight"].T])
    return parity.function(lambda tree, x: x, tree)


def rows_of(layout):
    return [each for group in layout.groups for each in group.rows]


def test_a_table_by_value_gives_the_weights_back():
    torch.manual_seed(0)
    module = Fused()
    port = held(module)
    layout = layout_by_value(module, port)
    paired = {key for each in rows_of(layout) for key in each.keys}
    assert paired == {*module.state_dict()} - {"out.bias"}
    back = transfer.export(port.parameters, layout)
    for name in paired:
        np.testing.assert_array_equal(back[name], module.state_dict()[name].numpy())


def test_weights_rounded_to_float16_are_paired_and_others_are_not():
    torch.manual_seed(0)
    module = Fused()
    assert len(rows_of(layout_by_value(module, held(module, rounded=True)))) == 4
    assert layout_by_value(Fused(), held(module)) is None
