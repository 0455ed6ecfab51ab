"""Code that several commands share: devices, selections, progress, signals and output."""
