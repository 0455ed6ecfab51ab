"""Checkpoints on disk, read lazily and written whole."""
