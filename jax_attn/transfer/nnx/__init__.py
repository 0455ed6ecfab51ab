"""NNX state meets a table: flattened by dotted paths, planned, loaded, exported."""
