"""Ports of whole models, right ones and wrong ones, for the tests that attack `check`."""
