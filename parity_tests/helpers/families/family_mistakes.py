"""What a whole model gives its blocks, and mistakes planted in a family's table or traits."""

from collections.abc import Callable
from dataclasses import replace

import torch

from helpers.families.family_cases import LENGTHS, B, BlockPair, T
from jax_attn import transfer
from jax_attn.parity.judge.compare import Verdict
from jax_attn.porting.verify import rebuild
from jax_attn.transfer import Layout
from jax_attn.transfer.table.rows import Row


def given_to(model: torch.nn.Module, place: str, **inputs: str) -> dict[str, torch.Tensor]:
    """What the block at `place` is called with by name when the model reads padded rows.

    inputs: what else of the model's gets the rows, "tokens", or what is real of them, "real".
    """
    seen = {}
    block = model.eval().get_submodule(place)
    block.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    tokens = torch.arange(B * T).reshape(B, T)
    real = torch.arange(T) < torch.from_numpy(LENGTHS)[:, None]
    with torch.inference_mode():
        rows = {"tokens": tokens, "real": real.long()}
        model(tokens, attention_mask=real.long(), **{to: rows[it] for to, it in inputs.items()})
    return seen


def assert_visible(added: torch.Tensor, traits) -> None:
    """The mask (B, 1, T, T) that a model adds to the scores hides what the traits say."""
    hidden = added < torch.finfo(added.dtype).min / 2
    assert torch.equal(~hidden, rebuild.torch_mask(traits, torch.from_numpy(LENGTHS), T))


def assert_seen(mistaken: Callable[[BlockPair], BlockPair], block: BlockPair) -> None:
    """A block so mistaken fails where the right one passes."""
    assert block.own is Verdict.PASS
    assert block.judge(mistaken(block)) is Verdict.FAIL


def but(*rows: Row):
    """The mistake of these rows in place of those of the same keys."""
    keys = {r.keys for r in rows}

    def mistaken(block: BlockPair) -> BlockPair:
        kept = (g for g in block.layout.groups if g.alternatives[0][0].keys not in keys)
        return loaded(block, layout=Layout(*kept, *rows, *block.layout.passed_over))

    return mistaken


def swapped(one: str, other: str):
    """The mistake of two of the module's parts taken for each other."""
    names = {one: other, other: one}
    return lambda block: loaded(block, layout=block.layout.renamed(names))


def otherwise(**traits):
    """The mistake of a module that does something else with the right weights."""
    return lambda block: loaded(block, traits=replace(block.traits, **traits))


def loaded(block: BlockPair, **changed) -> BlockPair:
    """The block that this layout, or these traits, would have given."""
    made = replace(block, **changed)
    port = rebuild.flax_module(made.traits, made.dtype)
    transfer.load(port, made.reference.state_dict(), made.layout)
    return replace(made, port=port)
