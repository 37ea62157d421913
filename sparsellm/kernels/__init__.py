"""Run-time compilation and launch of the device code in ``cuda/``."""
