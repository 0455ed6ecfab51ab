"""What the tests of each family do: a block against transformers' own, a whole file's table."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from flax import nnx

from helpers.same_arrays import assert_same
from jax_attn import parity, transfer
from jax_attn.families import family_of
from jax_attn.families.traits import Traits
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run.inputs_and_runs import Inputs, float_dtype
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.porting.verify import rebuild
from jax_attn.transfer import Layout
from jax_attn.transfer.table import resolve

B, T = 2, 7
LENGTHS = np.array([T, T - 2], np.int32)


@dataclass(frozen=True)
class BlockPair:
    """One attention block of transformers', ours with its weights, and what was read of it.

    theirs: (module, x, added mask (B, 1, T, T)) -> output (B, T, D).
    """

    reference: torch.nn.Module
    port: nnx.Module
    traits: Traits
    layout: Layout
    theirs: Callable
    dtype: str

    @classmethod
    def of(cls, reference, config, place: str, theirs, dtype="float32") -> "BlockPair":
        """reference: the block with random weights. config: transformers'. place: its prefix."""
        reference = reference.to(getattr(torch, dtype)).eval()
        family = family_of(config.to_dict())
        traits = family.traits(config.to_dict(), place)
        layout = family.block(config.to_dict()).spelled_as(reference.state_dict())
        port = rebuild.flax_module(traits, dtype)
        transfer.load(port, reference.state_dict(), layout)
        return cls(reference, port, traits, layout, theirs, dtype)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        x = np.random.default_rng(0).standard_normal((B, T, self.traits.embed_dim))
        return {"x": x, "lengths": LENGTHS}

    def call_reference(self, module, x, lengths):
        return self.theirs(module, x, added(rebuild.torch_mask(self.traits, lengths, T), x.dtype))

    def call_port(self, module, x, lengths):
        return module(x, mask=rebuild.flax_mask(self.traits, lengths))

    def check(self, transforms=("jit",)) -> parity.Result:
        """Outputs, every gradient and every weight."""
        return parity.check(
            self.reference,
            self.port,
            self.inputs,
            layout=self.layout,
            reference_call=self.call_reference,
            port_call=self.call_port,
            dtype=self.dtype,
            transforms=transforms,
        )

    @cached_property
    def prepared(self) -> Prepared:
        """The reference's side of a check of outputs alone, for many ports."""
        given = Inputs.of(self.inputs, float_dtype(self.dtype))
        called = Reference(self.reference, self.call_reference, given)
        return Prepared(called, self.dtype, gradients=False)

    def judge(self, other: "BlockPair") -> Verdict:
        """What the outputs of another block's port in this one's place are worth."""
        port = Port(other.port, other.call_port, self.prepared.reference.inputs)
        return judge_port(self.prepared, port, ("eager",), to_torch=None).verdict

    @cached_property
    def own(self) -> Verdict:
        """What those of this one's own port are worth."""
        return self.judge(self)


def added(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as transformers adds it to the scores."""
    return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)


def roundtrip(model: torch.nn.Module, folder) -> dict[str, str]:
    """A whole model of transformers' there and back.

    As it lives, as save_pretrained writes it, and with each tied tensor under another of its names
    alone. Every way the Flax side is the same and torch's comes back bit for bit; every block is
    found, and has the same traits. Returns the keys that were passed over, and why.
    """
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    file = dict(transfer.load_checkpoint(folder / "model.safetensors"))
    config = model.config.to_dict()
    family = family_of(config)
    arrays, traits = [], []
    passed: dict[str, str] = {}
    lives = model.state_dict()
    ties = family.model(config, lives).passed_over
    others = {tie.same_as: tie.key for tie in ties if tie.same_as in file and tie.key in lives}
    turned = {others.get(key, key): tensor for key, tensor in file.items()}
    for said, tensors in ((written, file), (config, lives), (config, turned)):
        layout = family.model(said, tensors)
        blocks = family.blocks(said, tensors)
        assert blocks
        traits.append([family.traits(said, place.torch) for place in blocks])
        shapes = layout.shapes({k: tuple(t.shape) for k, t in tensors.items()}, traits[-1][0].sizes)
        flax = layout.to_flax(tensors, shapes)
        passed |= (skipped := resolve.passed(layout.passed_over, tensors))
        kept = {key: tensor for key, tensor in tensors.items() if key not in skipped}
        assert_same(layout.to_torch(flax), kept)
        assert {place.flax for place in blocks} == {
            path.rsplit(".", 2)[0] for path in flax if path.endswith("q_proj.kernel")
        }
        arrays.append(flax)
    assert_same(*arrays[:2])
    assert_same(*arrays[1:])
    assert traits[0] == traits[1] == traits[2]
    return passed


def scattered(model: torch.nn.Module, dtype: str | None = None) -> torch.nn.Module:
    """The model with random numbers everywhere: biases of 0 hide what is mixed up."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model if dtype is None else model.to(getattr(torch, dtype))
