"""`sparsellm sweep`: many runs of one recipe, several at once, with one report of all.

May import `report`, `training` and `runs`; imported by the command line.
"""
