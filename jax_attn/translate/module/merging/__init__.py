"""Merge what the instances of a class do into one method and one `__init__`, with branches."""
