"""What the torch designs refuse, by name."""

import pytest
import torch

from helpers.torch_designs import B, D, N, S, T, built, seeded
from torch_ref import DESIGNS
from torch_ref.rotary import Rotary

REFUSALS = {
    "width not divided": (lambda cls: cls(D + 1, N), r"(d_model|embed_dim): .*num_heads=3, got 13"),
    "no heads": (lambda cls: cls(D, 0), "num_heads: expected an int of at least 1, got 0"),
    "negative heads": (lambda cls: cls(D, -3), "num_heads: .* got -3"),
    "true heads": (lambda cls: cls(D, True), "num_heads: .* got True"),
    "half heads": (lambda cls: cls(D, 1.5), r"num_heads: .* got 1\.5"),
}


@pytest.mark.parametrize(("build", "message"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("name", sorted(DESIGNS.keys() - {"torch_mha", "gqa"}))
def test_sizes_that_do_not_fit_are_refused_by_name(name, build, message):
    with pytest.raises(ValueError, match=message):
        build(DESIGNS[name])


GQA_REFUSALS = {
    "kv heads": (lambda: built("gqa", D, 3, 2), "num_heads: .* num_kv_heads=2, got 3"),
    "head_dim": (lambda: built("gqa", D, 3, 3, head_dim=0), "head_dim: "),
    "kdim": (lambda: built("gqa", D, 3, 3, kdim=-1), "kdim: "),
    "dropout": (lambda: built("gqa", D, 3, 3, dropout=1.5), r"dropout: .*\[0, 1\], got 1.5"),
    "softcap": (lambda: built("gqa", D, 3, 3, softcap=0.0), "softcap: "),
    "query": (lambda: built("gqa", D, 3, 3)(seeded(T, D)), "query: "),
    "no key": (lambda: built("gqa", D, 3, 3)(seeded(B, T, D), seeded(B, 0, D)), "key: "),
    "value": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), seeded(B, S, D), seeded(B, T, D)),
        r"value: expected \(2, 7, 12\), length above 0, got \(2, 5, 12\)",
    ),
    "float mask": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), mask=torch.ones(T, T)),
        "mask: expected a boolean",
    ),
    "rank 3": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), mask=torch.ones(B, T, T) > 0),
        r"rank 3 could mean \(B, T, S\) or \(N, T, S\)",
    ),
    "mask shape": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), mask=torch.ones(T, S) > 0),
        r"mask: .*\(2, 3, 5, 5\), got \(5, 7\)",
    ),
    "boolean bias": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), bias=torch.ones(T, T) > 0),
        "bias: expected a floating",
    ),
    "positions without rotary": (
        lambda: built("gqa", D, 3, 3)(seeded(B, T, D), positions=torch.arange(T)),
        "positions: expected None",
    ),
    "key positions without a key": (
        lambda: turning(seeded(B, T, D), key_positions=torch.arange(T)),
        "key_positions: expected None",
    ),
    "positions alone, with a key": (
        lambda: turning(seeded(B, T, D), seeded(B, S, D), positions=torch.arange(T)),
        "positions: expected positions and key_positions",
    ),
    "positions of another length": (
        lambda: turning(seeded(B, T, D), positions=torch.arange(S)),
        r"positions: expected \(5,\) or \(2, 5\), got \(7,\)",
    ),
    "more to turn than there is": (
        lambda: built("gqa", D, 3, 3, rotary=Rotary(dim=6)),
        "rotary: expected an even dim of 2 to head_dim=4, got 6",
    ),
}


def turning(*inputs, **positions):
    return built("gqa", D, 3, 3, rotary=Rotary())(*inputs, **positions)


@pytest.mark.parametrize(("call", "message"), GQA_REFUSALS.values(), ids=GQA_REFUSALS)
def test_gqa_refuses_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
