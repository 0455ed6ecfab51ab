"""Rules of losses."""

import pytest
import torch
from torch import tensor

from helpers.rule_comparison import differences
from helpers.rule_rows import F, G, call, named, paired, text
from jax_attn.translate.rules.table import RULES

PROBABILITIES = tensor([[0.2, 0.5, 0.9], [0.3, 0.7, 0.1]])
LABELS = tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
SIGNS = tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])
LOGITS = torch.linspace(-1, 1, 20).reshape(4, 5).sin()
CLASSES = tensor([1, 0, 3, 1])
LOGITS_BCT = torch.linspace(-1, 1, 30).reshape(2, 5, 3).cos()
CLASSES_BT = tensor([[1, 0, 4], [2, -100, 1]])
WEIGHT = tensor([0.5, 1.0, 2.0, 0.3, 1.0])
NONE, MEAN, SUM = 0, 1, 2

ROWS = [
    ("smooth_l1_loss.default", F, G, 1, 0.5),
    ("smooth_l1_loss.default", F, F + 1, 1),
    ("huber_loss.default", F, G, 2, 0.7),
    ("kl_div.default", F, PROBABILITIES),
    ("kl_div.default", F, PROBABILITIES, 0, {"log_target": True}),
    ("binary_cross_entropy.default", PROBABILITIES, LABELS),
    ("binary_cross_entropy.default", PROBABILITIES, LABELS, G, 2),
    ("binary_cross_entropy_with_logits.default", F, LABELS),
    ("binary_cross_entropy_with_logits.default", F, LABELS, G, F[0].abs(), 0),
    ("binary_cross_entropy_with_logits.default", F, LABELS, None, F[0].abs()),
    ("nll_loss.default", LOGITS[0], tensor(1)),
    ("nll_loss2d.default", LOGITS_BCT.unsqueeze(-1), CLASSES_BT.unsqueeze(-1)),
    ("nll_loss_forward.default", LOGITS, CLASSES, WEIGHT, 1, -100),
    ("nll_loss_forward.default", LOGITS, CLASSES, None, 1, 1),
    ("cross_entropy_loss.default", LOGITS_BCT, CLASSES_BT),
    ("cross_entropy_loss.default", LOGITS[0], tensor(1)),
    ("cross_entropy_loss.default", LOGITS_BCT, CLASSES_BT, WEIGHT, 1, -100, 0.2),
    ("poisson_nll_loss.default", F, G, True, False, 1e-08, 1),
    ("poisson_nll_loss.default", F.abs() + 1, G, False, False, 1e-08, 0),
    ("hinge_embedding_loss.default", F, SIGNS, 1.0, 1),
    ("margin_ranking_loss.default", F, G, SIGNS, 0.5, 1),
    ("margin_ranking_loss.default", F, F, SIGNS, 0.0, 0),
    *[
        (f"{name}_loss.default", F, G, reduction)
        for name in ("mse", "l1", "smooth_l1", "huber")
        for reduction in (NONE, MEAN, SUM)
    ],
    ("soft_margin_loss.default", F, SIGNS, MEAN),
    *[
        ("nll_loss_nd.default", LOGITS.log_softmax(1), CLASSES, weight, reduction, ignored)
        for weight in (None, WEIGHT)
        for reduction in (NONE, MEAN, SUM)
        for ignored in (-100, 1)
    ],
    *[
        ("cross_entropy_loss.default", LOGITS, CLASSES, weight, reduction, ignored, smoothing)
        for weight in (None, WEIGHT)
        for reduction, ignored in ((NONE, -100), (MEAN, 1), (SUM, 1))
        for smoothing in (0.0, 0.1)
    ],
    *[
        (
            "cross_entropy_loss.default",
            LOGITS,
            LOGITS.softmax(1),
            weight,
            reduction,
            -100,
            smoothing,
        )
        for weight in (None, WEIGHT)
        for reduction, smoothing in ((NONE, 0.1), (MEAN, 0.1), (SUM, 0.0))
    ],
]

TEXTS = [
    (("mse_loss.default", F, G), "jnp.square(x0 - x1).mean()"),
    (("l1_loss.default", F, G, SUM), "absolute(x0 - x1).sum()"),
    (("cross_entropy_loss.default", LOGITS, CLASSES), "nll_loss(jax.nn.log_softmax(x0), x1)"),
    (("huber_loss.default", F, G), "huber(x0 - x1).mean()"),
]

PLANTED = [
    (("mse_loss.default", F, G), "jnp.square(self - target).sum()"),
    (("huber_loss.default", F, G, MEAN, 0.7), "huber(self - target).mean()"),
    (
        ("cross_entropy_loss.default", LOGITS, CLASSES, None, MEAN, 1),
        "nll_loss(jax.nn.log_softmax(self), target)",
    ),
    (("nll_loss.default", LOGITS, CLASSES, WEIGHT), "nll_loss(self, target)"),
    (("kl_div.default", F, LABELS), "(target * (jnp.log(target) - self)).mean()"),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), named(ROWS))
def test_a_rule_equals_torch(name, args, kwargs):
    assert differences(name, *args, **kwargs) == []


@pytest.mark.parametrize(("row", "expected"), paired(TEXTS))
def test_the_text_is_what_a_person_would_write(row, expected):
    assert text(row) == expected


@pytest.mark.parametrize(("row", "wrong"), paired(PLANTED))
def test_a_wrong_rule_is_noticed(row, wrong, monkeypatch):
    name, args, kwargs = call(row)
    monkeypatch.setitem(RULES, name, wrong)
    assert differences(name, *args, **kwargs)
