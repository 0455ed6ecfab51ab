"""Calibration: correct configurations through the comparison."""
