"""The source of the NNX module: methods, classes, and the table of weights."""
