"""Hugging Face folders: written (``sparsellm export``) and read back (``sparsellm import``).

May import `analyze`, `runs`, `data` and `ffn`.
"""
