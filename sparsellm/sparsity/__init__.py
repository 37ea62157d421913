"""Sparse FFNs in any training loop: replacing a model's FFNs, L1, λ, statistics, kernels.

May import `ffn` and nothing of our own loop, which shares these parts.
"""
