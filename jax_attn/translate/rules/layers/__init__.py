"""Rules of layers of `torch.nn`."""
