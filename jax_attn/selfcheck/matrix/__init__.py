"""The built-in matrix: designs, cases, and its rows."""
