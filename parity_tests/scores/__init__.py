"""A labelled benchmark of ports, on which verifiers are scored: `python -m scores`."""
