"""A whole checkpoint carried from one framework to the other."""
