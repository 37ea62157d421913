"""Statistics of activation traces: plain numpy on compressed rows, one layer at a time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsellm.analyze.trace import Trace
from sparsellm.runs.records import position_bucket_starts

TILE_NEURONS = 256  # the gate GEMM's column tile (cuda/common/union.cuh)
HEAVY_ROW = 128  # the hybrid format's usual ELL width (paper, hybrid format)
UNION_TOKENS = (64, 128, 256)
HOT_NEURONS = (128, 256, 512, 1024)


def layer_statistics(trace: Trace, context_length: int) -> dict[str, Any]:
    """Everything that is stored of a layer, ready for JSON.

    Args:
        trace: of whole sequences, in order.
        context_length: tokens a sequence.
    """
    count_M = trace.count_M.astype(np.int64)
    activity_N = np.bincount(trace.index, minlength=trace.num_neurons)
    return {
        "nnz_mean": float(count_M.mean()),
        "nnz_p50": _nearest_rank(count_M, 50),
        "nnz_p99": _nearest_rank(count_M, 99),
        "nnz_max": int(count_M.max()),
        "heavy_rows": int((count_M > HEAVY_ROW).sum()),
        "tile_max": tile_max(trace),
        "never_fired_fraction": float((activity_N == 0).mean()),
        "union": {str(tokens): mean_union(trace, tokens) for tokens in UNION_TOKENS},
        "hot_share": {str(top): hot_share(activity_N, top) for top in HOT_NEURONS},
        "nnz_by_position": by_position(count_M, context_length),
    }


def _nearest_rank(count_M: NDArray[np.int64], percent: int) -> int:
    """The smallest count that at least ``percent`` of the tokens do not exceed."""
    rank = (len(count_M) * percent + 99) // 100
    return int(np.partition(count_M, rank - 1)[rank - 1])


def tile_max(trace: Trace, tile: int = TILE_NEURONS) -> int:
    """The most non-zeros that one token has in one tile of neighbouring neurons."""
    tiles = -(-trace.num_neurons // tile)
    places = trace.rows * tiles + trace.index // tile
    return int(np.bincount(places, minlength=1).max())


def mean_union(trace: Trace, tokens: int, row_M: NDArray[np.int64] | None = None) -> float:
    """Neurons that fire for at least one of ``tokens`` neighbours, mean over such blocks.

    ``row_M``: the place of each token in another order.
    """
    blocks = -(-trace.num_tokens // tokens)
    members = np.zeros(blocks * trace.num_neurons, dtype=bool)
    rows = trace.rows if row_M is None else row_M[trace.rows]
    members[rows // tokens * trace.num_neurons + trace.index] = True
    return float(members.sum() / blocks)


def hot_share(activity_N: NDArray[np.int64], top: int) -> float:
    """Share of all non-zeros that fall on the ``top`` most active neurons; 0 if there are none."""
    total = activity_N.sum()
    return float(np.sort(activity_N)[::-1][:top].sum() / total) if total else 0.0


def by_position(count_M: NDArray[np.int64], context_length: int) -> list[float]:
    """Mean non-zeros in each of `stats.position_bucket_starts`."""
    mean_T = count_M.reshape(-1, context_length).mean(axis=0)
    edges = [*position_bucket_starts(context_length), context_length]
    return [float(mean_T[a:b].mean()) for a, b in itertools.pairwise(edges) if b > a]


def token_extremes(
    mean_nnz_M: NDArray[np.float64], token_M: NDArray[np.integer], num: int, min_count: int
) -> tuple[list[tuple[int, float, int]], list[tuple[int, float, int]]]:
    """The token ids with the fewest and with the most non-zeros on average.

    Args:
        mean_nnz_M: non-zeros of each position, mean over layers.
        token_M: its input token.
        num: how many of each end.
        min_count: rarer tokens are left out: their mean is noise.

    Returns:
        Lowest and highest, as (token id, mean non-zeros, occurrences), most extreme first.
    """
    occurrences = np.bincount(token_M)
    totals = np.bincount(token_M, weights=mean_nnz_M)
    common = np.flatnonzero(occurrences >= max(min_count, 1))
    order = common[np.argsort(totals[common] / occurrences[common], kind="stable")]

    def entries(ids: NDArray[np.integer]) -> list[tuple[int, float, int]]:
        return [(int(i), float(totals[i] / occurrences[i]), int(occurrences[i])) for i in ids]

    return entries(order[:num]), entries(order[::-1][:num])
