"""Where a port first computes another number than its reference."""
