"""What `sparsellm bench` measures and records."""
