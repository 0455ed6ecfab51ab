"""Attention on one device: every kernel, that of the cache too."""
