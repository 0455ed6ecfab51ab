"""A reference that travels: prepared where torch is, written, and judged by where it is not."""
