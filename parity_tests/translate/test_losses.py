"""Rules of losses."""

import torch
from torch import tensor

from helpers.rules.rows import F, G, row, table

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
    row("smooth_l1_loss.default", F, G, 1, 0.5),
    row("smooth_l1_loss.default", F, F + 1, 1),
    row("huber_loss.default", F, G, 2, 0.7),
    row("kl_div.default", F, PROBABILITIES),
    row("kl_div.default", F, PROBABILITIES, 0, log_target=True),
    row("binary_cross_entropy.default", PROBABILITIES, LABELS),
    row("binary_cross_entropy.default", PROBABILITIES, LABELS, G, 2),
    row("binary_cross_entropy_with_logits.default", F, LABELS),
    row("binary_cross_entropy_with_logits.default", F, LABELS, G, F[0].abs(), 0),
    row("binary_cross_entropy_with_logits.default", F, LABELS, None, F[0].abs()),
    row("nll_loss.default", LOGITS[0], tensor(1)),
    row("nll_loss2d.default", LOGITS_BCT.unsqueeze(-1), CLASSES_BT.unsqueeze(-1)),
    row("nll_loss_forward.default", LOGITS, CLASSES, WEIGHT, 1, -100),
    row("nll_loss_forward.default", LOGITS, CLASSES, None, 1, 1),
    row("cross_entropy_loss.default", LOGITS_BCT, CLASSES_BT),
    row("cross_entropy_loss.default", LOGITS[0], tensor(1)),
    row("cross_entropy_loss.default", LOGITS_BCT, CLASSES_BT, WEIGHT, 1, -100, 0.2),
    row("poisson_nll_loss.default", F, G, True, False, 1e-08, 1),
    row("poisson_nll_loss.default", F.abs() + 1, G, False, False, 1e-08, 0),
    row("hinge_embedding_loss.default", F, SIGNS, 1.0, 1),
    row("margin_ranking_loss.default", F, G, SIGNS, 0.5, 1),
    row("margin_ranking_loss.default", F, F, SIGNS, 0.0, 0),
    *[
        row(f"{name}_loss.default", F, G, reduction)
        for name in ("mse", "l1", "smooth_l1", "huber")
        for reduction in (NONE, MEAN, SUM)
    ],
    row("soft_margin_loss.default", F, SIGNS, MEAN),
    *[
        row("nll_loss_nd.default", LOGITS.log_softmax(1), CLASSES, weight, reduction, ignored)
        for weight in (None, WEIGHT)
        for reduction in (NONE, MEAN, SUM)
        for ignored in (-100, 1)
    ],
    *[
        row("cross_entropy_loss.default", LOGITS, CLASSES, weight, reduction, ignored, smoothing)
        for weight in (None, WEIGHT)
        for reduction, ignored in ((NONE, -100), (MEAN, 1), (SUM, 1))
        for smoothing in (0.0, 0.1)
    ],
    *[
        row(
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
    row("mse_loss.default", F, G, text="jnp.square(x0 - x1).mean()"),
    row("l1_loss.default", F, G, SUM, text="absolute(x0 - x1).sum()"),
    row("cross_entropy_loss.default", LOGITS, CLASSES, text="nll_loss(jax.nn.log_softmax(x0), x1)"),
    row("huber_loss.default", F, G, text="huber(x0 - x1).mean()"),
]

MISTAKES = [
    row("mse_loss.default", F, G, wrong="jnp.square(self - target).sum()"),
    row("huber_loss.default", F, G, MEAN, 0.7, wrong="huber(self - target).mean()"),
    row(
        "cross_entropy_loss.default",
        LOGITS,
        CLASSES,
        None,
        MEAN,
        1,
        wrong="nll_loss(jax.nn.log_softmax(self), target)",
    ),
    row("nll_loss.default", LOGITS, CLASSES, WEIGHT, wrong="nll_loss(self, target)"),
    row("kl_div.default", F, LABELS, wrong="(target * (jnp.log(target) - self)).mean()"),
]


@table(ROWS, TEXTS, MISTAKES)
def test_values_gradients_and_dtypes_are_those_of_torch(row):
    row.check()
