"""The attention layers of a checkpoint, rebuilt in both frameworks and compared."""
