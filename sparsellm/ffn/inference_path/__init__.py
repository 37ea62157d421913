"""FFNs of finished models, made fast: found, checked by formula, replaced.

Imports only other modules of `ffn`.
"""
