"""Tables of weights: rows, the steps in them, and which rows apply to the names at hand."""
