"""What updates the weights, and at which learning rate."""
