"""A checkpoint in, a checkpoint out: looked at, carried across, verified."""
