"""`sparsellm eval`: lm-eval's tasks and scores. May import `runs`, `data` and `ffn`."""
