"""Sparsity statistics of the FFN layers: exact, over all ranks, never counted twice.

They come from the counters of a step (`counters`), which are fed by outputs of the graph, so that
recomputed layers count once. L layers, N intermediate_size, P position buckets, C = N + 1.
"""

import numpy as np

from sparsellm.runs.telemetry.records import StepStats
from sparsellm.sparsity.counts import percentile


def step_stats(
    histogram_LC: np.ndarray,
    nnz_LP: np.ndarray,
    dead_L: np.ndarray,
    position_tokens_P: list[int],
    nnz_edges: list[int],
) -> StepStats:
    """The statistics of one step, computed on the host.

    Args:
        histogram_LC: number of tokens with each number of non-zeros.
        nnz_LP: non-zeros of all tokens of each position bucket.
        dead_L: number of dead neurons.
        position_tokens_P: number of tokens in each position bucket.
        nnz_edges: see `nnz_bucket_edges`.
    """
    tokens_LC = histogram_LC.astype(np.int64)
    num_tokens, num_neurons = tokens_LC[0].sum(), tokens_LC.shape[1] - 1
    counts_C = np.arange(num_neurons + 1)
    cumulative_LC = tokens_LC.cumsum(1)
    return StepStats(
        nnz_mean=((tokens_LC * counts_C).sum(1) / num_tokens).tolist(),
        nnz_max=((tokens_LC > 0) * counts_C).max(1).tolist(),
        nnz_p50=percentile(cumulative_LC, 50),
        nnz_p99=percentile(cumulative_LC, 99),
        dead_fraction=(dead_L / num_neurons).tolist(),
        nnz_by_position=(nnz_LP / position_tokens_P).tolist(),
        nnz_histogram=np.add.reduceat(tokens_LC.sum(0), nnz_edges).tolist(),
    )
