"""`sparsellm eval`: lm-eval's tasks and scores."""
