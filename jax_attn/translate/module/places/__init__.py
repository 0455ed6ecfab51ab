"""Say where in the file each module, function and tensor of the reference is."""
