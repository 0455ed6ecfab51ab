"""T5's learned position bias: for each head one number for each bucket of distances."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_attn.attention import DistanceBias, checks
from jax_attn.attention.position_bias import bucket_problems, relative_buckets


class RelativeBias(nnx.Module):
    """T5's learned bias, (T, S) -> (N, T, S), added to the score of query i and key j.

    The result is float32, or float64 for float64. embedding (buckets, N) is drawn from N(0, 1),
    like torch.nn.Embedding's. Several attention modules may share one RelativeBias, as all blocks
    of T5 do.

    Args:
      num_heads: N.
      buckets, max_distance, bidirectional: as in ``relative_buckets``.
      param_dtype: the dtype of the new embedding.
      rngs: "params" for the embedding.

    Raises ArgumentError, which lists every problem with them. Raffel et al., 2020.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        problems = checks.count_problems(num_heads=num_heads)
        problems += bucket_problems(buckets, max_distance, bidirectional)
        problems += checks.dtype_problems("param_dtype", param_dtype)
        checks.raise_all(type(self).__name__, problems)
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        drawn = jax.random.normal(rngs.params(), (buckets, num_heads), jnp.dtype(param_dtype))
        self.embedding = nnx.Param(drawn)

    def __call__(self, T: int, S: int) -> Float[Array, "N T S"]:
        # First one row for each distance: a constant of T×S buckets would be as large as the bias.
        by_distance_NR = self._of(np.arange(1 - T, S))
        distance_TS = jnp.arange(S)[None] - jnp.arange(T)[:, None]
        return by_distance_NR[:, distance_TS + T - 1]

    def by_distance(self) -> DistanceBias:
        """Return the bias of every distance, for attention with a cache."""
        # All distances beyond max_distance are in the bucket of max_distance.
        most = self.max_distance
        return DistanceBias(self._of(np.arange(-most, most + 1)), -most)

    def _of(self, distance_R: Int[np.ndarray, " R"]) -> Float[Array, "N R"]:
        bucket_R = relative_buckets(
            distance_R,
            buckets=self.buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        # At least float32: the gradient of a row is a sum over all pairs in its bucket.
        wide = jnp.promote_types(self.embedding.dtype, jnp.float32)
        return self.embedding[...].astype(wide)[bucket_R].T
