"""The intermediate tensors of each side, with their origins."""
