"""Kernels of attention, with and without a cache; `mesh/` shards them over devices."""
