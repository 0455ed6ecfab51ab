"""The one catalogue of what ports do wrong, and the modes that plant a bug in a reference.

This file imports no framework, because explanations are read where torch is absent.
"""

FILL = 2.0**24
"""Numbers of at least this size count as a mask's fill; in float32 they absorb scores added to
them."""
