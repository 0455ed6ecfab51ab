"""Calibration: measure the false-alarm rate on random correct configurations."""
