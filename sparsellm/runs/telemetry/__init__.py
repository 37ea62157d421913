"""What a run records: metrics, evaluations, sessions, and their way to wandb.

Imports only other modules of `runs` and `recipe`.
"""
