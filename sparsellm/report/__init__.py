"""One HTML page or PNG plots of runs, from their folders alone; no wandb, no network.

May import `runs`.
"""
