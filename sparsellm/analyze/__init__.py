"""Analysis of a trained model's activations on real text."""
