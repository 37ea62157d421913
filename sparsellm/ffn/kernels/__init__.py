"""Compiles and launches the device code in ``cuda/``."""
