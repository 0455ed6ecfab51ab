"""The floating dtypes that both frameworks compute in, the most usual one first."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
