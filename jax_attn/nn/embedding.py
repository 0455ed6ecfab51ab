"""Lookup of table rows, also on a mesh of devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_attn.attention import meshes


def rows_of(table: jax.Array, at: jax.Array, pad: int | None = None) -> jax.Array:
    """Return rows of a table; NaN for indices outside it. Row `pad` gets no gradient."""
    at = jnp.where(at < 0, np.iinfo(np.int32).max, at)  # JAX would count from the end
    lie = None
    if (mesh := meshes.explicit_mesh((table, at))) is not None:
        # Sharded like the tokens, and like the features if another mesh axis shards those.
        of_tokens, (_, of_features) = meshes.cuts(at), meshes.cuts(table)
        used = {name for names in of_tokens for name in names}
        spec = meshes.spec([*of_tokens, () if used & {*of_features} else of_features])
        lie, table = NamedSharding(mesh, spec), meshes.whole(table, 0)
    rows = table.at[at].get(mode="fill", fill_value=jnp.nan, out_sharding=lie)
    if pad is None:
        return rows
    return jnp.where((at == pad)[..., None], jax.lax.stop_gradient(rows), rows)
