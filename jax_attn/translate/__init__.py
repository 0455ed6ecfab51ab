"""Write the source of an NNX module that computes what a torch module computes."""
