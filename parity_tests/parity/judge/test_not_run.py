"""What is listed without a verdict: the keys that JSON has at each level."""

from jax_attn.parity.judge.result import NotRun

SUBJECT = ("gqa", "forward", "float32", "prime")
IDENTITY = ["design", "direction", "dtype", "shape", "level", "target"]


def test_figures_stand_beside_the_identity_and_an_error_only_where_one_can_be():
    compiled = NotRun(*SUBJECT, "compiled", "v5e", figures={"flops": 2.0})
    assert list(compiled.as_dict()) == [*IDENTITY, "flops"]
    lowered = NotRun(*SUBJECT, "lowered", "cuda", figures={"operations": 3})
    assert lowered.as_dict()["error"] is None
    refused = NotRun(*SUBJECT, "refused", "cpu", error="it adds no bias")
    assert list(refused.as_dict()) == [*IDENTITY, "error"]
