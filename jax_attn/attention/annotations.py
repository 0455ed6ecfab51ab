"""Types that the signatures of this package's functions share."""

import jax
import numpy as np

# Arrays for functions that convert them to JAX arrays themselves.
AnyArray = jax.Array | np.ndarray
# Arrays for functions that run nothing and read only shapes and dtypes.
AbstractArray = AnyArray | jax.ShapeDtypeStruct
