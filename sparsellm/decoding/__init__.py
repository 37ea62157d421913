"""Generation by a step for one token of each sequence, which a GPU replays as a CUDA graph."""
