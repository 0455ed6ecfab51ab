"""Judging arrays: comparison, budget, oracle and result. NumPy only."""
