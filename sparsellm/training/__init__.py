"""One training run on every rank: the loop and what a step needs."""
