"""`jax-attn port --check`: what was written computes what torch does with the source's own rows."""

import json

import pytest
import torch

from helpers.families.family_models import ROWS
from helpers.transfer.port_cases import plain, ported, source_of
from helpers.transfer.starting_tables import heads_of, table_text
from helpers.transfer.torch_checkpoints import linears, tensors

pytestmark = pytest.mark.usefixtures("compiled_alone")

CHECKED = {"RIGHT": (0, "PASS"), "TURNED": (1, "FAIL")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_a_square_weight_turned_by_a_users_table_is_caught(tmp_path, name):
    status, verdict = CHECKED[name]
    source, target = plain(tmp_path, layers=1), tmp_path / "flax"
    options = ("--layout", f"helpers.transfer.port_tables:{name}", "--check", "--json")
    document = json.loads(ported(source, target, "flax", *options, status=status).stdout)
    assert document["proof"]["problems"] == []
    assert [case["verdict"] for case in document["check"]["cases"]] == [verdict]
    assert target.exists() == (status == 0)


FAMILIES = ("falcon of groups", "t5")


@pytest.mark.slow
def test_a_familys_own_attention_is_rebuilt_from_what_was_written(tmp_path, request):
    for name in FAMILIES if request.config.getoption("--long") else FAMILIES[:1]:
        row, folder = ROWS[name], tmp_path / name
        torch.manual_seed(0)
        row.model(row.config).save_pretrained(folder / "source")
        options = ("--check", "--json")
        done = ported(folder / "source", folder / "flax", "flax", *options)
        cases = json.loads(done.stdout)["check"]["cases"]
        assert {case["verdict"] for case in cases} == {"PASS"}
        assert len(cases) == row.layers + 3 * (name == "t5")  # a decoder's layer attends twice


@pytest.mark.slow
def test_keys_without_a_bias_by_design_pass(tmp_path, monkeypatch):
    """As Whisper's; in a model that is not known to have none, the missing bias is doubted."""
    shapes = linears("layers.0.self_attn", "q_proj k_proj v_proj out_proj")
    del shapes["layers.0.self_attn.k_proj.bias"]
    config = {"model_type": "whisper", "num_attention_heads": 6}
    source = source_of(tmp_path, tensors(shapes), config)
    text = table_text(source, tmp_path / "whisper_table.py")
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--layout", "whisper_table:LAYOUT", *heads_of(text), "--check", "--json")
    (case,) = json.loads(ported(source, tmp_path / "flax", "flax", *options).stdout)["check"][
        "cases"
    ]
    assert (case["verdict"], case["reasons"]) == ("PASS", [])
    (source / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    done = ported(source, tmp_path / "again", "flax", *options, status=4)
    (case,) = json.loads(done.stdout)["check"]["cases"]
    assert case["reasons"] == [
        "layers.0.self_attn.k_proj.bias: missing although sibling biases exist; using zeros"
    ]
