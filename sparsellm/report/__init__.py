"""One HTML page of runs, drawn from what lies in their folders; needs no wandb and no network."""
