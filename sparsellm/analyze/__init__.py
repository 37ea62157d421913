"""Analysis of a trained model's activations on real text. May import `runs`, `data`, `ffn`."""
