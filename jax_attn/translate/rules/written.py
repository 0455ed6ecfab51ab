"""Functions that torch has and JAX has not; a translated file contains the source of those it uses.

Each stands alone: it uses `jax`, `jnp` and other functions of this file, nothing else.
"""

from jax_attn.translate.rules.functions.fourier import centered_window, istft, stft  # noqa: F401
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
from jax_attn.translate.rules.functions.pools import (  # noqa: F401
    adaptive_avg_pool,
    adaptive_bounds,
    adaptive_max_pool,
    at_flat,
    col2im,
    dilated_max_pool,
    max_pool_indices,
    max_unpool,
    transposed_kernel,
    window_argmax,
)
from jax_attn.translate.rules.functions.recurrent import (  # noqa: F401
    gru_cell,
    lstm_cell,
    recurrent,
    rnn_relu_cell,
    rnn_tanh_cell,
)
from jax_attn.translate.rules.functions.resizing import (  # noqa: F401
    affine_grid,
    cubic,
    grid_sample,
    resize,
    upsample_nearest,
)
