"""The numbers of a step: counted on the device, reduced over ranks, and what kernels they choose.

Imports only `sparsity`, `ffn`, `recipe` and other modules of `training`.
"""
