"""One HTML page of runs, made from their folders alone, without wandb or network."""
