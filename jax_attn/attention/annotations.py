"""Types that the signatures of this package's functions share."""

import jax
import numpy as np

# What a function takes where it converts to JAX itself.
AnyArray = jax.Array | np.ndarray
# A call may also describe its arrays only, where nothing is run.
AbstractArray = AnyArray | jax.ShapeDtypeStruct
