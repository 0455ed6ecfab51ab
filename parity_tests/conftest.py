"""Settings for the whole suite; they must be made before jax starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
