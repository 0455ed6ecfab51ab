"""Judge arrays: budget, comparison, findings and result. This package uses only NumPy."""
