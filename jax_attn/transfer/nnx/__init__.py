"""Tables applied to the state of NNX modules."""
