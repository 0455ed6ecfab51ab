"""Export a torch module as one functional graph, with marks where modules were called."""
