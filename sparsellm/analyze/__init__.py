"""What a trained model's activations look like on real text."""
