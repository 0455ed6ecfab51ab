"""Checking a port against its reference."""
