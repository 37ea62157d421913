"""Sparsity statistics of the FFN layers: exact, over all ranks, never counted twice.

They come from the counters of a step (`counters`), which are fed by outputs of the graph, so that
recomputed layers count once. L layers, N intermediate_size, P position buckets, C = N + 1.
"""

import numpy as np
import torch
from torch import Tensor

from sparsellm.runs.records import StepStats


class SparsityStats:
    """How long each neuron has been silent, and how often it fired in the last window of tokens.

    Args:
        num_layers: L.
        intermediate_size: N.
        window_tokens: a neuron silent for at least this many tokens is dead.
        device: where the numbers live.
    """

    def __init__(
        self, num_layers: int, intermediate_size: int, window_tokens: int, device: torch.device
    ) -> None:
        self.window_tokens = window_tokens
        shape = (num_layers, intermediate_size)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        # All steps, all ranks; saved with the checkpoint.
        self.silent_tokens_LN = zeros(*shape)
        self.window_fired_LN = zeros(*shape)
        self.window_seen_tokens = zeros()
        self.activity_LN = zeros(*shape)  # of the last complete window
        self.activity_tokens = zeros()

    @torch.no_grad()
    def advance(self, fired_LN: Tensor, num_tokens: int, refused: Tensor) -> None:
        """Adds a step, unless it is refused; the host does not wait for that.

        Args:
            fired_LN: number of tokens, of all ranks, for which each neuron fired.
            num_tokens: of the step, over all ranks.
            refused: (), not zero if the step does not count.
        """
        taken = refused == 0
        fired_LN, tokens = (fired_LN * taken).long(), taken * num_tokens
        silent = fired_LN == 0
        self.silent_tokens_LN = torch.where(silent, self.silent_tokens_LN + tokens, 0)
        self.window_fired_LN += fired_LN
        self.window_seen_tokens += tokens
        # No branch: the host would wait here for the device, and the GPU then for the host.
        complete = self.window_seen_tokens >= self.window_tokens
        for last, window in (
            (self.activity_LN, self.window_fired_LN),
            (self.activity_tokens, self.window_seen_tokens),
        ):
            last.copy_(torch.where(complete, window, last))
            window.masked_fill_(complete, 0)

    def dead_LN(self) -> Tensor:
        """(L, N) bool: neurons that have been silent for at least `window_tokens`."""
        return self.silent_tokens_LN >= self.window_tokens

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run goes on from."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores a `state_dict`, on this device."""
        for name in _STATE:
            getattr(self, name).copy_(state[name])


_STATE = (
    "silent_tokens_LN",
    "window_fired_LN",
    "window_seen_tokens",
    "activity_LN",
    "activity_tokens",
)


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

    def percentile(percent: int) -> list[int]:
        """Nearest rank: the smallest count that ``percent`` of the tokens do not exceed."""
        return (cumulative_LC < (num_tokens * percent + 99) // 100).sum(1).tolist()

    return StepStats(
        nnz_mean=((tokens_LC * counts_C).sum(1) / num_tokens).tolist(),
        nnz_max=((tokens_LC > 0) * counts_C).max(1).tolist(),
        nnz_p50=percentile(50),
        nnz_p99=percentile(99),
        dead_fraction=(dead_L / num_neurons).tolist(),
        nnz_by_position=(nnz_LP / position_tokens_P).tolist(),
        nnz_histogram=np.add.reduceat(tokens_LC.sum(0), nnz_edges).tolist(),
    )
