"""Sparsity statistics of the FFN layers: exact, over all ranks, never counted twice.

`SparsityStats` is fed once per micro-batch from `LossSums` (outside the recomputed graph), sums
integers over ranks once per step, and keeps the per-neuron windows that decide which neurons are
dead. L layers, N intermediate_size, P position buckets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsellm.runs.records import (
    StepStats,
    nnz_bucket_edges,
    num_position_buckets,
    position_bucket_starts,
)
from sparsellm.training.host_copy import HostCopy

AllReduce = Callable[[Tensor], None]  # sums a tensor over ranks, in place


class SparsityStats:
    """Accumulates one step, then folds it into the windows.

    Args:
        num_layers: L.
        intermediate_size: N.
        context_length: T, tokens.
        window_tokens: a neuron silent for at least this many tokens is dead.
        device: where the counters live.
    """

    def __init__(
        self,
        num_layers: int,
        intermediate_size: int,
        context_length: int,
        window_tokens: int,
        device: torch.device,
    ) -> None:
        self.window_tokens = window_tokens
        shape = (num_layers, intermediate_size)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        # This step, this rank.
        self._histogram_LC = zeros(num_layers, intermediate_size + 1)
        self._fired_LN = zeros(*shape)
        num_buckets = num_position_buckets(context_length)
        self._position_nnz_LP = zeros(num_layers, num_buckets)
        self._position_tokens_P = zeros(num_buckets)
        starts = torch.tensor(position_bucket_starts(context_length), device=device)
        positions = torch.arange(context_length, device=device)
        self._bucket_T = torch.bucketize(positions, starts, right=True) - 1
        self._last: list[Tensor] = []  # of the last step, over all ranks
        # All steps, all ranks; saved with the checkpoint.
        self.silent_tokens_LN = zeros(*shape)
        self.window_fired_LN = zeros(*shape)
        self.window_seen_tokens = zeros()
        self.activity_LN = zeros(*shape)  # of the last complete window
        self.activity_tokens = zeros()

    @torch.no_grad()
    def update(self, nnz_LBT: Tensor, fired_LN: Tensor) -> None:
        """Adds one micro-batch of this rank."""
        num_layers = nnz_LBT.shape[0]
        nnz_LM = nnz_LBT.reshape(num_layers, -1).long()
        self._histogram_LC.scatter_add_(1, nnz_LM, torch.ones_like(nnz_LM))
        self._fired_LN += fired_LN
        self._position_nnz_LP.index_add_(1, self._bucket_T, nnz_LBT.sum(dim=1).long())
        per_position = torch.full_like(self._bucket_T, nnz_LBT.shape[1])
        self._position_tokens_P.index_add_(0, self._bucket_T, per_position)

    @torch.no_grad()
    def finish_step(self, all_reduce: AllReduce, refused: Tensor | None = None) -> None:
        """Sums over ranks, advances the windows and empties the step's counters.

        A step that was ``refused`` (other than zero) counts for nothing.
        """
        step = self._step_counters()
        flat = torch.cat([counter.flatten() for counter in step])
        all_reduce(flat)
        if refused is not None:
            flat *= refused == 0
        sizes = [counter.numel() for counter in step]
        self._last = [r.view_as(c) for r, c in zip(flat.split(sizes), step, strict=True)]
        for counter in step:
            counter.zero_()
        histogram_LC, fired_LN = self._last[:2]
        self._advance_windows(fired_LN, tokens=histogram_LC[0].sum())

    @torch.no_grad()
    def summary(self) -> StepSummary:
        """Of the last step, after `finish_step`."""
        histogram_LC, _, position_nnz_LP, position_tokens_P = self._last
        return StepSummary(histogram_LC, position_nnz_LP, position_tokens_P, self.dead_LN())

    def drop_step(self) -> None:
        """Clears the counters of a step that did not come to its end; the windows stay."""
        for counter in self._step_counters():
            counter.zero_()

    def _step_counters(self) -> list[Tensor]:
        return [
            self._histogram_LC,
            self._fired_LN,
            self._position_nnz_LP,
            self._position_tokens_P,
        ]

    def _advance_windows(self, fired_LN: Tensor, tokens: Tensor) -> None:
        silent = fired_LN == 0
        self.silent_tokens_LN = torch.where(silent, self.silent_tokens_LN + tokens, 0)
        self.window_fired_LN += fired_LN
        self.window_seen_tokens += tokens
        # No branch: the host would wait here for the optimizer, and the GPU then for the host.
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
        """The windows; taken between steps, when the step's counters are empty."""
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


class StepSummary:
    """A step's statistics, computed on the device; `read` waits for them."""

    def __init__(
        self,
        histogram_LC: Tensor,
        position_nnz_LP: Tensor,
        position_tokens_P: Tensor,
        dead_LN: Tensor,
    ) -> None:
        counts_C = torch.arange(histogram_LC.shape[1], device=histogram_LC.device)
        tokens = histogram_LC[0].sum()
        cumulative_LC = histogram_LC.cumsum(1)
        present_LC = histogram_LC > 0
        edges = torch.tensor(nnz_bucket_edges(histogram_LC.shape[1] - 1))
        edges = edges.to(counts_C.device, non_blocking=True)
        buckets_C = torch.bucketize(counts_C, edges, right=True) - 1
        self._values = HostCopy(
            (histogram_LC * counts_C).sum(1).double() / tokens,
            (present_LC * counts_C).amax(1),
            _percentile(cumulative_LC, tokens, 50),
            _percentile(cumulative_LC, tokens, 99),
            dead_LN.double().mean(1),
            position_nnz_LP.double() / position_tokens_P.clamp(min=1),
            torch.zeros_like(edges).index_add_(0, buckets_C, histogram_LC.sum(0)),
        )

    def read(self) -> StepStats:
        """The statistics as numbers."""
        values = [value.tolist() for value in self._values.read()]
        mean, most, median, high, dead, by_position, histogram = values
        return StepStats(
            nnz_mean=mean,
            nnz_max=most,
            nnz_p50=median,
            nnz_p99=high,
            dead_fraction=dead,
            nnz_by_position=by_position,
            nnz_histogram=histogram,
        )


def _percentile(cumulative_LC: Tensor, tokens: Tensor, percent: int) -> Tensor:
    """The smallest count that at least ``percent`` of the tokens do not exceed (nearest rank)."""
    rank = (tokens * percent + 99) // 100
    return (cumulative_LC < rank).sum(1)
