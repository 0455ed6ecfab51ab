"""What several commands share: devices, selections, progress, and how an outcome is told."""
