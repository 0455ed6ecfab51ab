"""Both sides run: inputs and outputs, torch modes, emulated matrix units."""
