"""What a checkpoint is, from its headers and its config alone."""
