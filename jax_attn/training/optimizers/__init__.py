"""The optax equivalents of torch optimizers and schedulers."""
