"""Tables of weights: rows, their steps, and the choice of rows for given names."""
