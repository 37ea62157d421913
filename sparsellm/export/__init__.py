"""Hugging Face folders: written (``sparsellm export``) and read back (``sparsellm import``)."""
