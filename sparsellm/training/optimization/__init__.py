"""What updates the weights, and at which learning rate.

Imports only `ffn` and `recipe`.
"""
