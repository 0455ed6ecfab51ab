"""Mixtures of experts: their tables, and what configs say of them.

transformers' modules hold stacks, gate_up_proj (X, 2·F, D) and down_proj (X, D, F); files have the
matrices of each expert.
"""

from typing import NamedTuple

from jax_attn.families.config import Reading
from jax_attn.families.traits import ExpertTraits
from jax_attn.transfer import Layout, either, linear, linears, packed_stack, row, stacked


class ExpertNames(NamedTuple):
    """How files of a model_type spell experts, and transformers' defaults.

    module: that of router and experts; gate, up, down: layers of an expert. width: the name of an
    expert's width in configs, and the default.
    """

    module: str
    gate: str
    up: str
    down: str
    width: tuple[str, int]
    number: int
    chosen: int


SPELLED = {
    "mixtral": ExpertNames(
        "block_sparse_moe", "w1", "w3", "w2", ("intermediate_size", 14336), 8, 2
    ),
    "qwen3_moe": ExpertNames(
        *("mlp", "gate_proj", "up_proj", "down_proj"), ("moe_intermediate_size", 768), 128, 8
    ),
}
"""model_type -> what is its own."""

_COUNTS = ("num_local_experts", "num_experts")
_MOST = 4096
"""The most experts of a layer: a table has a key for each."""


def count(config: Reading, default: int | None = None) -> int:
    """Return the number of experts; default: that of the model_type unless given."""
    if default is None:
        default = SPELLED[config.get("model_type")].number
    number = config.number(*_COUNTS, default=default)
    if number > _MOST:
        config.refuse(_COUNTS[0], number, f"at most {_MOST} experts")
    return min(number, _MOST)


def width(config: Reading) -> int:
    """Return the features between the layers of an expert."""
    name, default = SPELLED[config.get("model_type")].width
    return config.number(name, default=default)


def chosen(config: Reading, number: int, default: int) -> int:
    """Return how many of `number` experts a token is sent to."""
    each = config.number("num_experts_per_tok", default=default)
    if each > number:
        expected = f"at most {number}, the number of experts"
        config.refuse("num_experts_per_tok", each, expected, number, each)
    return each


def traits(config: Reading) -> ExpertTraits:
    """Return how experts are chosen. Refuses layers that have a single MLP in their place."""
    kind, number = config.get("model_type"), count(config)
    each = chosen(config, number, SPELLED[kind].chosen)
    if kind == "mixtral":
        return ExpertTraits(number, each, are_normalized=True)
    if (dense := config.get("mlp_only_layers")) not in (None, []):
        config.refuse("mlp_only_layers", dense, "[]: layers without experts are not supported")
    if (step := config.number("decoder_sparse_step", default=1)) != 1:
        config.refuse("decoder_sparse_step", step, "1: layers without experts are not supported")
    return ExpertTraits(number, each, config.flag("norm_topk_prob", default=False))


def table(config: Reading) -> Layout:
    """Return the table of a block's experts, as files and as transformers' modules spell them."""
    own = SPELLED[config.get("model_type")]

    def of_each(name: str) -> tuple[str, ...]:
        return tuple(f"{own.module}.experts.{x}.{name}.weight" for x in range(count(config)))

    routers = (f"{module}.gate.weight" for module in dict.fromkeys((own.module, "mlp")))
    gate, up, down = (f"mlp.experts.{name}.kernel" for name in ("gate", "up", "down"))
    return Layout(
        either(*(row(key, "mlp.router.kernel", linear) for key in routers)),
        either(
            (
                row(of_each(own.gate), gate, stacked, linears),
                row(of_each(own.up), up, stacked, linears),
            ),
            row("mlp.experts.gate_up_proj", (gate, up), packed_stack, linears),
        ),
        either(
            row(of_each(own.down), down, stacked, linears),
            row("mlp.experts.down_proj", down, linears),
        ),
    )
