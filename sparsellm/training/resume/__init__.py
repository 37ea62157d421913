"""How a run begins or goes on from a checkpoint, and what is refused then.

Imports `runs`, `data` and other modules of `training`.
"""
