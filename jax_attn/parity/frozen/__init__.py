"""A port judged from outside: its file runs in a process of its own, which hands back arrays."""
