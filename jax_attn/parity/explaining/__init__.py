"""Find where a port first computes another number than its reference, and why."""
