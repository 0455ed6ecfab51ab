"""One rule an operator of torch, in files by kind."""
