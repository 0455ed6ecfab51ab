"""One rule an operator of torch, in files by kind; those of layers of `torch.nn` in a room."""
