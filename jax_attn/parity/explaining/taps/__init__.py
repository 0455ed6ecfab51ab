"""The tensors that each side computes on the way, with where they come from."""
