"""Attention as an NNX module: four projections around ``dot_product_attention``."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jax_attn.attention import (
    Alibi,
    DistanceBias,
    KVCache,
    attend_with_cache,
    attention_weights,
    checks,
)
from jax_attn.attention import dot_product_attention as attend
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.broadcasting import broadcasting
from jax_attn.attention.dispatch import Implementation
from jax_attn.attention.mask import MaskLike
from jax_attn.attention.rotary import Rotary
from jax_attn.nn import arguments, constructor
from jax_attn.nn.arguments import Placement, Positions
from jax_attn.nn.projection import Projection, normal, torch_linear_init

# transformers' initializer_range for gpt-oss.
SINKS_DEVIATION = 0.02


class GroupedQueryAttention(nnx.Module):
    """Attention with ``num_heads`` query heads that share ``num_kv_heads`` key/value heads.

    out_proj(dot_product_attention(q_proj(query), k_proj(key), v_proj(value))); query head n reads
    key/value head n // (num_heads // num_kv_heads). Kernels: q_proj (D, N, H), k_proj (kdim, K, H),
    v_proj (vdim, K, H), out_proj (N, H, D); biases (N, H), (K, H), (K, H), (D,). Queries and keys
    are projected, then normalised (q_norm, k_norm), then rotated, if so configured.

    Args:
      embed_dim: D, the features of query and output.
      num_heads, num_kv_heads: N and K; N is a multiple of K.
      head_dim: H; embed_dim // num_heads unless given.
      kdim, vdim: features of key and value; embed_dim unless given.
      use_bias: whether q_proj, k_proj and v_proj have a bias, or the names of those that do, such
        as ("q_proj", "v_proj").
      use_out_bias: whether out_proj has a bias; by default, whether any of the others has.
      dropout_rate: that of the attention weights.
      out_dropout_rate: that of the output, after out_proj.
      scale, softcap, precision, implementation: as in ``dot_product_attention``; precision also
        applies to the projections.
      qk_norm: makes q_norm and k_norm, for example ``nnx.RMSNorm``; called as ``qk_norm(H, dtype=…,
        param_dtype=…, rngs=…)``. Each normalises the H features of a head; all heads share its
        parameters. No norm by default.
      add_bias_kv: whether there are bias_k (K, H) and bias_v (K, H), a learned key and value, drawn
        from N(0, 1 / (K · H)), as torch.nn.MultiheadAttention's.
      add_zero_attn: whether there are a key and a value of 0.
      sinks: whether there are sinks (N,), for each query head a learned score that belongs to no
        key, drawn from N(0, 0.02²), as gpt-oss's. These three are as in ``dot_product_attention``:
        every query sees them; they are not normalised, rotated or biased.
      rotary: a Rotary, which rotates queries and keys by their positions; none by default.
      position_bias: an Alibi, a RelativeBias or another function ``position_bias(T, S)`` that
        returns floats to add to the scores, which broadcast to (N, T, S); none by default.
      dtype: dtype of computation and output; what inputs and parameters promote to by default.
      param_dtype: the dtype of new parameters.
      kernel_init: U(±1/√fan_in), as torch.nn.Linear, unless given.
      bias_init: the same if None, with the fan_in of the bias's kernel.
      sharding: a dict from embed, heads, kv_heads and head_dim to the mesh axis that shards them, a
        tuple of several, or a name of ``nnx.logical_axis_rules``. By default kv_heads is sharded
        like heads if the mesh axes divide it. If a mesh is set (``jax.set_mesh``), the parameters
        are placed on it. Otherwise they only carry the names, for ``nnx.get_partition_spec``, and
        divisibility is not checked: pass ``kv_heads`` None for a mesh with more devices along the
        heads than key/value heads.
      rngs: "params" for the parameters; if there is dropout, the module keeps a fork of "dropout".

    As in torch, a new module is in training mode (``deterministic`` False); ``eval()`` and
    ``train()`` switch. Raises ArgumentError, which lists every problem with the arguments.

    Ainslie et al., "GQA", 2023; qk_norm: Henry et al., 2020; rotary: Su et al., 2021.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        use_bias: bool | Collection[str] = True,
        use_out_bias: bool | None = None,
        dropout_rate: float = 0.0,
        out_dropout_rate: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        qk_norm: Callable[..., nnx.Module] | None = None,
        rotary: Rotary | None = None,
        position_bias: Callable[[int, int], jax.Array] | None = None,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        sinks: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: nnx.Initializer = torch_linear_init,
        bias_init: nnx.Initializer | None = None,
        implementation: Implementation = None,
        sharding: Mapping[str, str | tuple[str, ...] | None] | None = None,
        rngs: nnx.Rngs,
    ):
        sizes: dict[str, Any] = {"embed_dim": embed_dim, "num_heads": num_heads}
        sizes |= {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "kdim": kdim, "vdim": vdim}
        rates = {"dropout_rate": dropout_rate, "out_dropout_rate": out_dropout_rate}
        given: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision}
        given |= {"scale": scale, "softcap": softcap, "implementation": implementation}
        given |= {"qk_norm": qk_norm, "rotary": rotary, "position_bias": position_bias}
        given |= {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, "sinks": sinks}
        problems = constructor.problems(sizes, rates, use_bias, sharding, rngs=rngs, **given)
        checks.raise_all(type(self).__name__, problems)

        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout_rate, self.out_dropout_rate = float(dropout_rate), float(out_dropout_rate)
        self.scale, self.softcap = scale, softcap
        self.rotary, self.position_bias = rotary, position_bias
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.precision, self.implementation = precision, implementation
        self.deterministic = False

        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": jnp.dtype(param_dtype)}
        inits: dict[str, Any] = {"kernel_init": kernel_init, "bias_init": bias_init, "rngs": rngs}
        projection: Any = functools.partial(Projection, precision=precision, **inits, **dtypes)
        N, K, H, D = num_heads, num_kv_heads, self.head_dim, embed_dim
        d, n, k_axis, h = constructor.names(sharding, num_kv_heads)
        q, k, v = constructor.with_bias(use_bias)
        out = (q or k or v) if use_out_bias is None else use_out_bias
        self.q_proj = projection((D,), (N, H), use_bias=q, names=(d, n, h))
        self.k_proj = projection((self.kdim,), (K, H), use_bias=k, names=(d, k_axis, h))
        self.v_proj = projection((self.vdim,), (K, H), use_bias=v, names=(d, k_axis, h))
        self.out_proj = projection((N, H), (D,), use_bias=out, names=(n, h, d))
        self.q_norm: Any = nnx.data(None)
        self.k_norm: Any = nnx.data(None)
        if qk_norm is not None:
            self.q_norm, self.k_norm = (qk_norm(H, rngs=rngs, **dtypes) for _ in range(2))
        self.add_zero_attn = add_zero_attn
        learned = functools.partial(normal, rngs, dtype=jnp.dtype(param_dtype))
        nothing, deviation = nnx.data(None), (K * H) ** -0.5
        self.bias_k = learned((K, H), deviation, names=(k_axis, h)) if add_bias_kv else nothing
        self.bias_v = learned((K, H), deviation, names=(k_axis, h)) if add_bias_kv else nothing
        self.sinks = learned((N,), SINKS_DEVIATION, names=(n,)) if sinks else nothing
        draws = (dropout_rate > 0 or out_dropout_rate > 0) and {"dropout", "default"} & {*rngs}
        self.rngs: nnx.RngStream | None = rngs.dropout.fork() if draws else nnx.data(None)

    @overload
    def __call__(
        self,
        query: Float[AnyArray, "B T D"],
        key: Float[AnyArray, "B S kdim"] | None = None,
        value: Float[AnyArray, "B S vdim"] | None = None,
        mask: MaskLike | None = None,
        *,
        is_causal: bool = False,
        bias: Float[AnyArray, "*#BNTS"] | None = None,
        positions: Positions | None = None,
        key_positions: Positions | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        keep: Bool[AnyArray, "*#BNTS"] | None = None,
        out_keep: Bool[AnyArray, "*#BTD"] | None = None,
        cache: None = None,
    ) -> Float[Array, "B T D"]: ...

    @overload
    def __call__(
        self,
        query: Float[AnyArray, "B T D"],
        key: None = None,
        value: None = None,
        mask: MaskLike | None = None,
        *,
        is_causal: bool = False,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        bias: Alibi | DistanceBias | None = None,
        cache: KVCache,
    ) -> tuple[Float[Array, "B T D"], KVCache]: ...

    @broadcasting
    def __call__(
        self,
        query: AnyArray,
        key: AnyArray | None = None,
        value: AnyArray | None = None,
        mask: MaskLike | None = None,
        *,
        is_causal: bool = False,
        bias: Any = None,
        positions: Positions | None = None,
        key_positions: Positions | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        keep: AnyArray | None = None,
        out_keep: AnyArray | None = None,
        cache: KVCache | None = None,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Attend from query to key and value.

        Args:
          query: (B, T, D).
          key: (B, S, kdim); the query unless given.
          value: (B, S, vdim); the key unless given.
          mask, is_causal, bias: as in ``dot_product_attention``, or an Alibi; with a cache, the
            bias is an Alibi or a DistanceBias.
          positions: positions of the queries, for rotary; integers (T,) or (B, T), 0 … T−1 unless
            given. Without a key, the keys have the same positions.
          key_positions: positions of the keys, (S,) or (B, S). With a key, give both positions or
            neither; the default is 0 … S−1.
          deterministic: True for no dropout; by default as set by train() or eval().
          rngs: an nnx.Rngs with a "dropout" stream, or a stream; the module's own unless given.
          keep: boolean, True = kept, used in place of dropout's random draw; broadcasts to
            (B, N, T, S), with the extra columns of ``attention_weights``.
          out_keep: the same for the output; broadcasts to (B, T, D).
          cache: a KVCache of the tokens before the query's. The query's tokens attend to all of it
            and, causally, to themselves, by the cache's own kernel; ``implementation`` must be
            None. Their positions follow from the cache; the mask may hold their lengths and a
            window (see ``jax_attn.attention.attend_with_cache``).

        Returns:
          (B, T, D) in ``dtype``, or in what inputs and parameters promote to; with a cache, a pair
          of that and the cache extended by the query's tokens.

        Raises:
          ArgumentError: lists every problem with the arguments, including dropout without a random
            stream and a keep mask when nothing is dropped.
        """
        placement = Placement(positions, key_positions, alone=key is None)
        if cache is not None:
            others = {"key": key, "value": value, "positions": positions}
            others |= {"key_positions": key_positions, "keep": keep, "out_keep": out_keep}
            checks.raise_all(
                type(self).__name__,
                arguments.cache_problems(
                    self, query, cache, bias, others, deterministic, is_causal
                ),
            )
        q_BTD, k_BSD, v_BSD = arguments.sequences(self, query=query, key=key, value=value)
        if cache is not None:
            return self._continued(q_BTD, mask, bias, cache)
        dropout, out_dropout = arguments.dropouts(
            self, q_BTD.shape, deterministic, rngs, keep, out_keep
        )
        q_BTNH, k_BSKH, v_BSKH = self._heads(q_BTD, k_BSD, v_BSD, placement)
        attended_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask,
            is_causal=is_causal,
            bias=arguments.with_position_bias(self, bias, q_BTD, k_BSD),
            dropout=dropout,
            implementation=self.implementation,
            bias_v=arguments.cast(self.bias_v, q_BTNH),
            **arguments.scoring(self, q_BTNH),
        )
        out_BTD = self.out_proj(attended_BTNH)
        return out_BTD if out_dropout is None else out_dropout.apply(out_BTD)

    @broadcasting
    def attention_weights(
        self,
        query: Float[AnyArray, "B T D"],
        key: Float[AnyArray, "B S kdim"] | None = None,
        mask: MaskLike | None = None,
        *,
        is_causal: bool = False,
        bias: Float[AnyArray, "*#BNTS"] | None = None,
        positions: Positions | None = None,
        key_positions: Positions | None = None,
    ) -> Float[Array, "B N T S+E"]:
        """Return the weights by which ``__call__`` averages the values, before dropout.

        They are (B, N, T, S), followed by a column for bias_k and one for the zero key, if there
        are any. Arguments and errors are those of ``__call__``.
        """
        placement = Placement(positions, key_positions, alone=key is None)
        q_BTD, k_BSD = arguments.sequences(self, query=query, key=key)
        q_BTNH, k_BSKH = self._heads(q_BTD, k_BSD, None, placement)
        bias = arguments.with_position_bias(self, bias, q_BTD, k_BSD)
        return attention_weights(
            q_BTNH, k_BSKH, mask, is_causal=is_causal, bias=bias, **arguments.scoring(self, q_BTNH)
        )

    def empty_cache(
        self,
        batch: int,
        length: int | None = None,
        *,
        window: int | None = None,
        dtype: DTypeLike | None = None,
        sharding: PartitionSpec | None = None,
    ) -> KVCache:
        """Return a KVCache for this module: for ``length`` tokens a row, or a ring of ``window``.

        dtype: that of keys and values; by default the module's dtype, or its parameters'. sharding:
        the axes of the current mesh that shard batch, key/value heads and places.
        """
        if dtype is None:
            dtype = self.k_proj.kernel.dtype if self.dtype is None else self.dtype
        K, H = self.num_kv_heads, self.head_dim
        sizes: dict[str, Any] = {"num_kv_heads": K, "head_dim": H, "window": window}
        return KVCache.empty(batch, length, **sizes, dtype=dtype, sharding=sharding)

    def _continued(
        self, query: jax.Array, mask: MaskLike | None, bias: Any, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Return the output for the tokens after those in the cache, and the extended cache."""
        positions = None if self.rotary is None else cache.positions(query.shape[1])
        q_BTNH, k_BTKH, v_BTKH = self._heads(query, query, query, Placement(positions))
        options = arguments.scoring(self, q_BTNH) | {"bias_v": arguments.cast(self.bias_v, q_BTNH)}
        options |= arguments.cached_bias(self, bias)
        attended_BTNH, cache = attend_with_cache(q_BTNH, k_BTKH, v_BTKH, cache, mask, **options)
        return self.out_proj(attended_BTNH), cache

    def _heads(
        self, query: jax.Array, key: jax.Array, value: jax.Array | None, placement: Placement
    ) -> list[jax.Array]:
        """Return queries (B, T, N, H), keys and any values (B, S, K, H), in one dtype."""
        problems = arguments.placement_problems(query, key, placement, self.rotary)
        checks.raise_all(type(self).__name__, problems)
        q_BTNH, k_BSKH = self.q_proj(query), self.k_proj(key)
        if self.q_norm is not None:
            # flax's norms promote bfloat16 to float32 inside, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"):
                q_BTNH, k_BSKH = self.q_norm(q_BTNH), self.k_norm(k_BSKH)
        if self.rotary is not None:
            q_BTNH, k_BSKH = arguments.turned(q_BTNH, k_BSKH, placement, self.rotary)
        arrays = [q_BTNH, k_BSKH] + ([] if value is None else [self.v_proj(value)])
        # Inputs or kernels may differ in dtype.
        dtype = jnp.result_type(*arrays)
        return [x.astype(dtype) for x in arrays]
