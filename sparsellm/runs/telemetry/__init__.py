"""What a run records: metrics, evaluations, sessions, and their way to wandb."""
