"""The package's evidence for itself: the matrix, planted bugs, and random correct ports."""
