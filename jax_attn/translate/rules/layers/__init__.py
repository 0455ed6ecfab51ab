"""Hold the rules of layers of `torch.nn`."""
