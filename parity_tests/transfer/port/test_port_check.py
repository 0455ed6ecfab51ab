"""`jax-attn port --check`: what was written computes what torch does with the source's own rows."""

import json

import pytest
import torch

from helpers.families.family_models import ROWS
from helpers.port_cases import plain, ported

pytestmark = pytest.mark.usefixtures("compiled_alone")

CHECKED = {"RIGHT": (0, "PASS"), "TURNED": (1, "FAIL")}


@pytest.mark.parametrize("name", CHECKED)
def test_a_square_weight_turned_by_a_users_table_is_caught(tmp_path, name):
    status, verdict = CHECKED[name]
    source, target = plain(tmp_path, layers=1), tmp_path / "flax"
    options = ("--layout", f"helpers.port_tables:{name}", "--check", "--json")
    document = json.loads(ported(source, target, "flax", *options, status=status).stdout)
    assert document["proof"]["problems"] == []
    assert [case["verdict"] for case in document["check"]["cases"]] == [verdict]
    assert target.exists() == (status == 0)


FAMILIES = ("falcon of groups", "t5")


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
