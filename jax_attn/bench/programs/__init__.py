"""The timed programs: builders from a workload and its arrays to a `Program`."""
