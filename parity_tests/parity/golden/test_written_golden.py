"""Golden references as version 0.1.0 wrote them: later versions judge alike, without torch."""

import json

import pytest

from helpers.parity.written_golden import DATA, TABLES, attention, embedder
from jax_attn.parity import check, load_golden
from jax_attn.parity.golden.folder import FORMAT
from jax_attn.transfer import LAYOUTS

DIGESTS = {
    "attention": "3c50fa52debd1442dc56cab360adb1a5946495848d51aca1611cfb4fb480b3c5",
    "embedder": "4462453af40ef3a0818103b2b9a033e2b31e0e4fa0a627011907afeda6f6b08b",
}
LAYOUT = {"attention": LAYOUTS["torch_mha"], "embedder": TABLES}
PORTS = {
    # golden, port -> verdict, and kinds of findings among others
    "attention, right": ("attention", attention, "PASS", {"scope"}),
    "attention, another scale": ("attention", lambda: attention(0.6), "FAIL", {"over-budget"}),
    "embedder, right": ("embedder", embedder, "PASS", {"padding-row"}),
    "embedder, positions unread": (
        "embedder",
        lambda: embedder(reads=False),
        "FAIL",
        {"input-ignored"},
    ),
}


@pytest.mark.parametrize("name", PORTS)
def test_ports_are_judged_as_they_were_when_it_was_written(name):
    folder, port, verdict, kinds = PORTS[name]
    golden = load_golden(DATA / folder, expect_digest=DIGESTS[folder])
    result = check(golden, port(), layout=LAYOUT[folder], transforms=("eager",))
    assert result.verdict == verdict, str(result)
    assert kinds | {"golden-reference"} <= {found.kind for found in result.findings}
    assert {t.kind for t in result.tensors} >= {"output", "gradient of parameter"}


def test_they_are_of_the_first_format():
    for name in DIGESTS:
        assert json.loads((DATA / name / "golden.json").read_text())["format"] == 1 <= FORMAT
        assert load_golden(DATA / name).captured["jax-attn"] == "0.1.0"
