"""Whether a port trains as its reference does: one recipe, run by torch and by optax, compared."""
