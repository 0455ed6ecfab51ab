"""What a result tells programs: the kinds of its findings, by weight."""

from jax_attn.parity.judge.result import Result

WEIGHTS = ("failure", "doubt", "note", "standing note")


def kinds(result: Result, *weights: str) -> list[str]:
    """Those of some weights, or of all, sorted: a kind as often as it is found."""
    assert {*weights} <= {*WEIGHTS}
    return sorted(f.kind for f in result.findings if f.weight in (weights or WEIGHTS))


def sentences(result: Result, kind: str) -> list[str]:
    return [f.sentence for f in result.findings if f.kind == kind]
