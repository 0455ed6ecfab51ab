"""Planted bugs: the bugs, the rows that claim to detect them, and the rows that did."""
