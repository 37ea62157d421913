"""How a run begins or goes on from a checkpoint, and what is refused then."""
