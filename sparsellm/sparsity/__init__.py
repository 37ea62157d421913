"""Sparse FFNs in any training loop: replacing a model's FFNs, L1, λ, statistics, kernels.

Our own loop shares these parts.
"""
