"""Pretraining of language models whose feedforward layers are sparse, and fast because of it."""

__version__ = "0.1.0"
