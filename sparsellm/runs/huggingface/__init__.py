"""Checkpoints and Hugging Face folders as one kind of source: found, read, translated.

Imports only other modules of `runs`, `data`, `model` and `recipe`.
"""
