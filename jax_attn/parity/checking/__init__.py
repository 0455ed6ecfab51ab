"""Check a port against its reference."""
