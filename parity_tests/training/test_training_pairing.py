"""check_training where parameters do not pair one to one: ties, and buffers as parameters."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds, sentences
from jax_attn import parity, transfer
from jax_attn.parity.judge.compare import Verdict
from jax_attn.transfer import LINEAR, Layout, linear, row, tied

WORDS, WIDTH, OUT = 11, 5, 3
RNG = np.random.default_rng(0)
TEXTS = [{name: RNG.integers(0, WORDS, (2, 7)) for name in ("ids", "target")} for _ in range(2)]
ROWS = [
    {
        "input": RNG.standard_normal((13, WIDTH), np.float32),
        "target": RNG.standard_normal((13, OUT), np.float32),
    }
    for _ in range(2)
]


class Texts(torch.nn.Module):
    """An embedding whose weight is its head's, too."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


class TextsPort(nnx.Module):
    def __init__(self, is_tied: bool):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.head = None if is_tied else nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = jnp.tanh(self.embed(ids))
        return self.head(x) if self.head else self.embed.attend(x)


def embedding(name: str) -> transfer.Layout:
    return Layout(row(f"{name}.weight", "embed.embedding"))


TIES = {
    "a row and its tie": (embedding("embed") + Layout(tied("head.weight", "embed.weight")), True),
    "under the other name": (embedding("head") + Layout(tied("embed.weight", "head.weight")), True),
    "a row without a tie": (embedding("embed"), True),
    "two copies in the port": (
        embedding("embed") + Layout(row("head.weight", "head.kernel", linear)),
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TIES)
def test_a_parameter_with_two_names_trains_as_one(name):
    layout, is_tied = TIES[name]
    reference, port = Texts(), TextsPort(is_tied)
    named = {key for key in reference.state_dict() if f"'{key}'" in str([*layout.torch_keys()])}
    weights = {key: a for key, a in reference.state_dict().items() if key in named}
    transfer.load(port, weights, layout)
    options = {
        "layout": layout,
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9),
        "loss": "cross_entropy",
        "steps": 2,
    }
    result = parity.check_training(reference, port, TEXTS, **options)
    assert result.verdict is (Verdict.PASS if is_tied else Verdict.FAIL), str(result)
    if not is_tied:
        ties = [
            line for line in sentences(result, "weights-differ") if "ties 'head.weight'" in line
        ]
        assert len(ties) == 1
        assert ties[0] in result.explain().sentence
        wrong = {t.transform for t in result.tensors if t.verdict is Verdict.FAIL}
        assert "first batch" in wrong
        assert not wrong & {"update 1", "update 3"}  # the optimizers are alike


class Scaled(torch.nn.Module):
    """A linear layer, scaled by a buffer."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, OUT)
        self.register_buffer("scale", torch.rand(OUT) + 0.5)

    def forward(self, input):
        return self.layer(input) * self.scale


class ScaledPort(nnx.Module):
    """The same, with the buffer as a parameter."""

    def __init__(self):
        self.layer = nnx.Linear(WIDTH, OUT, rngs=nnx.Rngs(0))
        self.scale = nnx.Param(jnp.ones(OUT))

    def __call__(self, input):
        return self.layer(input) * self.scale[...]


SCALED = Layout(LINEAR.under("layer", "layer"), row("scale", "scale"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "verdict", "failures"),
    [
        (None, Verdict.PASS, []),
        (optax.sgd(0.1), Verdict.FAIL, ["buffer-trained"]),
    ],
    ids=["optax_like", "an optimizer of its own"],
)
def test_a_buffer_that_the_port_holds_as_a_parameter_stands_still(own, verdict, failures):
    reference, port = Scaled(), ScaledPort()
    transfer.load(port, reference.state_dict(), SCALED)
    result = parity.check_training(
        reference,
        port,
        ROWS,
        layout=SCALED,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1),
        loss="mse",
        steps=3,
        clip_norm=0.5,  # by a norm in which a buffer's gradient has no part
        port_optimizer=own and optax.chain(optax.clip_by_global_norm(0.5), own),
    )
    assert result.verdict is verdict, str(result)
    assert [f.kind for f in result.failures] == failures
    assert "buffer-gradient" in kinds(result, "standing note")
