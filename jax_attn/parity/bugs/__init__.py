"""The one catalogue of what ports do wrong, and the modes that plant a bug in a reference."""
