"""Modes of torch in which a module runs in float64, as it is or perturbed, and what they ask."""
