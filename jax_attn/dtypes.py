"""Floating-point dtypes in which both frameworks compute, the most common one first."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
