"""Check that a port trains as its reference: run one recipe in torch and in optax, and compare."""
