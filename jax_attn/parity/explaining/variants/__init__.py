"""The catalogue of common mistakes of ports, which are tried in place of an operation."""
