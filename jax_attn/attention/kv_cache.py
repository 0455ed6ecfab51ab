"""Cached keys and values of earlier tokens, so that each new token costs one step."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_attn.attention import checks, meshes


@dataclasses.dataclass(frozen=True)
class PageSizes:
    """Division of a cache's places into pages, and how much of a page one operation works on.

    first: places in the first page. Each later page is as large as all pages before it. A step
    reads whole pages, those that hold any token, because on XLA:CPU a product with a whole array is
    twice as fast as one with a slice of it; so a step reads at most twice what is filled.
    few_tokens: up to this many new tokens are written one by one; more are written a page at a
    time.
    query_tile: the scores of this many queries are written out at a time.
    """

    first: int = 512
    few_tokens: int = 16
    query_tile: int = 64

    def __post_init__(self) -> None:
        problems = checks.count_problems(first=self.first, query_tile=self.query_tile)
        if not (checks.is_int(self.few_tokens) and self.few_tokens >= 0):
            got = checks.summary(self.few_tokens)
            problems.append(f"few_tokens: expected an int ≥ 0, got {got}")
        checks.raise_all("PageSizes", problems)

    def places(self, length: int) -> list[int]:
        """Return the number of places in each page of a cache of ``length`` tokens a row."""
        places: list[int] = []
        while sum(places) < length:
            places.append(min(max(sum(places), self.first), length - sum(places)))
        return places


DEFAULT_SIZES = PageSizes()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "filled"],
    meta_fields=["window", "page_sizes", "sharding"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """Keys and values of earlier tokens, which `module(x, cache=cache)` attends to and extends.

    A pytree of static shapes, so it passes through jit, scan and donation. Create one with `empty`
    or with a module's `empty_cache`.

    Attributes:
      keys: the pages of keys, (B, K, H, P); together they have `length` places a row.
      values: the pages of values, (B, K, P, Hv).
      filled: (B,) int32, the number of tokens each row has read.
      window: None if token n is in place n. Otherwise the places are a ring: token n is in place
        n % window, and only the last `window` tokens can be attended to.
      page_sizes: how the places are divided into pages.
      sharding: as passed to `empty` if a mesh was set, because arrays in a mesh of Auto axes do not
        expose theirs.
    """

    keys: tuple[Float[Array, "B K H _P"], ...]
    values: tuple[Float[Array, "B K _P Hv"], ...]
    filled: Int[Array, " B"]
    window: int | None = None
    page_sizes: PageSizes = DEFAULT_SIZES
    sharding: PartitionSpec | None = None

    @staticmethod
    def empty(
        batch: int,
        length: int | None = None,
        *,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        window: int | None = None,
        dtype: DTypeLike = jnp.float32,
        sharding: PartitionSpec | None = None,
        page_sizes: PageSizes = DEFAULT_SIZES,
    ) -> "KVCache":
        """Return a cache that holds no tokens yet.

        Args:
          batch: B.
          length: the most tokens that a row can hold. Give this or `window`.
          window: how many tokens a token sees, including itself; a row may then hold any number.
          num_kv_heads, head_dim: K and H.
          value_dim: Hv; H unless given.
          dtype: that of keys and values.
          sharding: the axes of the current mesh along which batch, key/value heads and places are
            sharded, such as `P("data", "heads")` or `P("data", None, "places")`. In a scan in a
            mesh of Explicit axes it must equal the sharding of the tokens and their heads.
          page_sizes: how places are divided into pages; the default was the fastest measured.

        Raises:
          ArgumentError: lists every problem with the arguments.
        """
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        optional = {"length": length, "window": window, "value_dim": value_dim}
        sizes |= {name: size for name, size in optional.items() if size is not None}
        problems = checks.count_problems(**sizes)
        if (length is None) == (window is None):
            problems.append(f"length, window: expected one of them, got {length!r} and {window!r}")
        problems += checks.dtype_problems("dtype", dtype)
        if sharding is not None and not isinstance(sharding, PartitionSpec):
            problems.append(f"sharding: expected a PartitionSpec, got {checks.summary(sharding)}")
        if not isinstance(page_sizes, PageSizes):
            got = checks.summary(page_sizes)
            problems.append(f"page_sizes: expected a PageSizes, got {got}")
        lie = sharding or PartitionSpec()
        places: list[int] = []
        if not problems:
            places = page_sizes.places(sizes["length" if window is None else "window"])
        mesh = jax.sharding.get_abstract_mesh()
        if not problems and mesh.shape:
            cut = (batch, num_kv_heads, math.gcd(*places))
            problems += meshes.misfits("sharding", lie, cut, mesh.shape)
        checks.raise_all("KVCache.empty", problems)
        value_dim = head_dim if value_dim is None else value_dim
        K, H, Hv = num_kv_heads, head_dim, value_dim
        of_keys = _of_keys(lie)
        return KVCache(
            keys=tuple(meshes.zeros((batch, K, H, n), dtype, of_keys) for n in places),
            values=tuple(meshes.zeros((batch, K, n, Hv), dtype, lie) for n in places),
            filled=meshes.zeros((batch,), jnp.int32, PartitionSpec(*lie[:1])),
            window=window,
            page_sizes=page_sizes,
            sharding=sharding if mesh.shape else None,
        )

    @property
    def length(self) -> int:
        """Number of places of a row."""
        return sum(value.shape[2] for value in self.values)

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        pages = (*self.keys, *self.values)
        return sum(math.prod(page.shape) * page.dtype.itemsize for page in pages)

    def page(self, n: int) -> tuple[Float[Array, "B K H _P"], Float[Array, "B K _P Hv"]]:
        """Return keys (B, K, H, P) and values (B, K, P, Hv) of page n, constrained to `sharding`.

        Without the constraint XLA shards them by the query's heads, and gathers them again for the
        new cache if there are fewer key/value heads than devices.
        """
        if self.sharding is None:
            return self.keys[n], self.values[n]
        at = _of_keys(self.sharding), self.sharding
        return meshes.kept(self.keys[n], at[0]), meshes.kept(self.values[n], at[1])

    def positions(self, T: int) -> Int[Array, "B T"]:
        """Return the positions of the next T tokens, (B, T) int32."""
        return self.filled[:, None] + jnp.arange(T, dtype=jnp.int32)[None]

    def __repr__(self) -> str:
        if not all(map(checks.is_array, (*self.keys, *self.values))):
            fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
            return f"KVCache({fields})"  # a transform put placeholders in place of arrays
        B, K, H, _ = self.keys[0].shape
        places = f"length={self.length}" if self.window is None else f"window={self.window}"
        value = f"{self.keys[0].dtype} B={B} K={K} H={H} Hv={self.values[0].shape[3]}"
        return f"KVCache({places}, {value}, {self.nbytes / 2**20:.1f} MiB)"


def _of_keys(sharding: PartitionSpec) -> PartitionSpec:
    """Return the sharding of a page of keys (B, K, H, P), given that by batch, heads and places."""
    return PartitionSpec(*sharding[:2], *([None, *sharding[2:]] if sharding[2:] else []))
