"""Judge arrays: comparison, budget, oracle and result. This package uses only NumPy."""
