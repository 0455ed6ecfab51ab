"""Tables applied to NNX state: flattening by dotted paths, planning, loading, exporting."""
