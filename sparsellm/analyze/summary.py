"""The union of neighbouring tokens on a recorded trace: plain numpy on compressed rows."""

from __future__ import annotations

import numpy as np

from sparsellm.analyze.trace import Trace


def mean_union(trace: Trace, tokens: int) -> float:
    """Neurons that fire for at least one of ``tokens`` neighbours, mean over such blocks."""
    blocks = -(-trace.num_tokens // tokens)
    members = np.zeros(blocks * trace.num_neurons, dtype=bool)
    members[trace.rows // tokens * trace.num_neurons + trace.index] = True
    return float(members.sum() / blocks)
