"""Every kernel of attention, that of the cache too; `mesh/` cuts them over devices."""
