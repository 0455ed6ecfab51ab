"""Write one call of a module as the statements of a method, with the names of torch's source."""
