"""What proves this package right: the matrix, planted bugs, correct ports drawn at random."""
