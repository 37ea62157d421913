"""`sparsellm sweep`: many runs of one recipe, several in parallel, with one report.

May import `report`, `training` and `runs`; imported by the command line.
"""
