"""The built-in matrix: designs, cases, and the rows made of them."""
