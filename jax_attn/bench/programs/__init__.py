"""What is timed: builders from a workload and its arrays to a `Program`."""
