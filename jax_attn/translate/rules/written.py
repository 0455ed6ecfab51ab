"""Functions that torch has and JAX has not; a translated file contains the source of those it uses.

Each stands alone: it uses `jax`, `jnp` and other functions of this file, nothing else.
"""

from jax_attn.translate.rules.functions.indexing import (  # noqa: F401
    along,
    bottom_k,
    embedded,
    embedding_bag,
    masked_scatter,
    scatter_max,
    scatter_mean,
    scatter_min,
    sort_descending,
)
from jax_attn.translate.rules.functions.pools import transposed_kernel  # noqa: F401
