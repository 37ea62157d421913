"""The FFN as it trains: the module, the operators with their gradients, the size of active sets."""
