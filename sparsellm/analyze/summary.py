"""The union of neighbouring tokens on a recorded trace: plain numpy on compressed rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsellm.analyze.trace import Trace


def mean_union(trace: Trace, tokens: int, row_M: NDArray[np.int64] | None = None) -> float:
    """Neurons that fire for at least one of ``tokens`` neighbours, mean over such blocks.

    ``row_M``: the place of each token in another order.
    """
    blocks = -(-trace.num_tokens // tokens)
    members = np.zeros(blocks * trace.num_neurons, dtype=bool)
    rows = trace.rows if row_M is None else row_M[trace.rows]
    members[rows // tokens * trace.num_neurons + trace.index] = True
    return float(members.sum() / blocks)
