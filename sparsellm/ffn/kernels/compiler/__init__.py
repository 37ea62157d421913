"""Compiles the files of cuda/ for the GPU at hand, and keeps the machine code.

Imports only other modules of `ffn.kernels`, `paths` and `ffn.activations`.
"""
