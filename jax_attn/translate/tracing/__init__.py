"""What a torch module computes: its functional graph as a tree of calls, with torch's own lines."""
