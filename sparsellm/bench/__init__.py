"""What `sparsellm bench` measures and records. May import everything but the command line."""
