"""Checkpoints and Hugging Face folders as one kind of source: found, read, translated."""
