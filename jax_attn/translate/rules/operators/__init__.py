"""Hold the rules of operators that are no layers, in files by kind."""
