"""`sparsellm sweep`: many runs of one recipe, several in parallel, with one report."""
