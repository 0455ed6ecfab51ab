"""A pair in a file of the user's: `FILE.py:make`, which every command reads alike."""
