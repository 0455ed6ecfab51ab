"""Write the source of the NNX module from the traced graph: methods, classes, and the file."""
