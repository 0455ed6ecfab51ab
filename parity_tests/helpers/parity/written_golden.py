"""Golden references that were written once, and the ports that are judged by them ever after.

`python -m helpers.parity.written_golden FOLDER` writes them where torch is. The folders in
`parity_tests/parity/golden/data` stay as they were written, whatever writes new ones.
"""

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jax_attn import MultiHeadAttention
from jax_attn.transfer import EMBEDDING, LAYOUTS, Layout, load

DATA = Path(__file__).parents[2] / "parity" / "golden" / "data"
B, T, D, HEADS, VOCABULARY = 2, 5, 6, 3, 7


def _drawn(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}


ATTENTION = _drawn(in_proj_weight=(3 * D, D), in_proj_bias=(3 * D,)) | {
    f"out_proj.{name}": array for name, array in _drawn(weight=(D, D), bias=(D,)).items()
}
EMBEDDER = {
    f"{name}.weight": array.astype(ml_dtypes.bfloat16)
    for name, array in _drawn(tokens=(VOCABULARY, D), places=(T, D)).items()
}
TABLES = Layout(EMBEDDING.under("tokens", "tokens"), EMBEDDING.under("places", "places"))


def attention(scale: float | None = None) -> nnx.Module:
    port = MultiHeadAttention(D, HEADS, rngs=nnx.Rngs(0), scale=scale)
    load(port, ATTENTION, LAYOUTS["torch_mha"])
    return port


class Embedder(nnx.Module):
    def __init__(self, reads: bool):
        make = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.tokens, self.places = (nnx.Embed(n, D, **make) for n in (VOCABULARY, T))
        self.reads = reads

    def __call__(self, tokens: Any, positions: Any) -> Any:
        positions = positions if self.reads else jnp.broadcast_to(jnp.arange(T), positions.shape)
        return self.tokens(tokens) * jnp.tanh(self.places(positions))


def embedder(reads: bool = True) -> nnx.Module:
    port = Embedder(reads)
    load(port, EMBEDDER, TABLES)
    return port


def write(folder: Path) -> None:
    import torch

    from jax_attn.parity import prepare

    class TorchEmbedder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(VOCABULARY, D, padding_idx=0)
            self.places = torch.nn.Embedding(T, D)

        def forward(self, tokens, positions):
            return self.tokens(tokens) * torch.tanh(self.places(positions))

    def holding(module: torch.nn.Module, weights: dict[str, np.ndarray]) -> torch.nn.Module:
        held = {k: torch.from_numpy(a.astype(np.float32)) for k, a in weights.items()}
        module.load_state_dict(held)
        return module.eval()

    rng = np.random.default_rng(1)
    x = rng.standard_normal((B, T, D)).astype(np.float32)
    of_attention = holding(torch.nn.MultiheadAttention(D, HEADS, batch_first=True), ATTENTION)
    prepare(of_attention, (x,), reference_call=lambda m, x: m(x, x, x)[0]).save(
        folder / "attention"
    )
    given = {
        "tokens": rng.integers(0, VOCABULARY, (B, T)),
        "positions": np.tile(np.arange(T), (B, 1)),
    }
    of_embedder = holding(TorchEmbedder(), EMBEDDER).bfloat16()
    prepare(of_embedder, given, dtype="bfloat16").save(folder / "embedder")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
