"""What updates the weights, and at which rate.

Imports only `ffn` and `recipe`.
"""
