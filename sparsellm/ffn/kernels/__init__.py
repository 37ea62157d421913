"""Compiles and launches the device code in ``cuda/``; imported by the rest of `ffn` alone."""
