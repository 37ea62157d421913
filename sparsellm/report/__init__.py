"""One HTML page or PNG plots of runs, made from their folders alone, without wandb or network.

May import `runs`.
"""
