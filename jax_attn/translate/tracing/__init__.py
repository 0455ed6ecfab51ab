"""Trace what a torch module computes: a functional graph as a tree of calls, with torch's lines."""
