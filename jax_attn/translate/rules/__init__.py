"""Write one call of an operator of torch as JAX, by one rule an operator."""
