"""Read in torch's own source where an operator was called and what its values are named."""
