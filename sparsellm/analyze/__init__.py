"""What a trained model's activations look like on real text. May import `runs`, `data`, `ffn`."""
