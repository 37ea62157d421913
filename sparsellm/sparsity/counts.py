"""What is counted of neurons: in a step, and since each of them was last active.

It is counted on the device, over all ranks and never twice. A step's counters are slices of one
float64 buffer, which adds integers exactly up to 2^53; they are summed over ranks once.

L layers, M tokens of a micro-batch, N neurons of the widest layer, C = N + 1: the numbers of
non-zeros that a token can have.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.ffn.types import BLOCK_TOKENS, FFNStats
from sparsellm.sparsity.over_ranks import Group, all_reduce_sum


class _Slices(NamedTuple):
    largest_union_L: Tensor  # columns of this rank's micro-batches; not summed over ranks
    num_tokens: Tensor
    num_blocks: Tensor
    recomputed: Tensor
    l1_L: Tensor
    nnz_L: Tensor
    union_L: Tensor


class StepNumbers(NamedTuple):
    """What the host reads of a step: over all ranks, but for the last."""

    num_tokens: int
    l1_L: list[float]  # `FFNStats.l1_sum`, mean over tokens
    nnz_L: list[float]  # non-zeros per token
    union_L: list[float]  # neurons active for any of 64 neighbouring tokens, mean
    recomputed: int  # patterns that backward computed again, for want of room
    largest_union_L: list[int]  # columns, of this rank's micro-batches


class StepCounts:
    """The counters of one step.

    Args:
        num_layers: L.
        num_neurons: N.
        device: where they live.
    """

    def __init__(self, num_layers: int, num_neurons: int, device: torch.device) -> None:
        sizes = [num_layers, 1, 1, 1, num_layers, num_layers, num_layers]
        self._num_layers, self._sizes = num_layers, sizes
        num_read = sum(sizes)
        num_active = num_layers * num_neurons
        num_all = num_read + num_active + num_layers * (num_neurons + 1)
        self._buffer = torch.zeros(num_all, dtype=torch.float64, device=device)
        self._read, active, histogram = self._buffer.split(
            [num_read, num_active, num_all - num_read - num_active]
        )
        self._at = _Slices(*self._read.split(sizes))
        self.active_LN = active.view(num_layers, -1)
        self.histogram_LC = histogram.view(num_layers, -1)
        self._one = torch.ones((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, stats: list[FFNStats], capacity_L: Tensor) -> None:
        """Adds a micro-batch of this rank.

        Args:
            stats: of each layer, all of the same number of tokens.
            capacity_L: columns that each layer's pattern had room for.
        """
        at, num_tokens = self._at, stats[0].nnz_M.numel()
        nnz_LM = torch.stack([s.nnz_M for s in stats]).long()
        union_L = torch.stack([s.union_sum for s in stats])
        most = self.active_LN.shape[1]
        active = [F.pad(s.active_N, (0, most - s.active_N.numel())) for s in stats]
        at.num_tokens.add_(num_tokens)
        at.num_blocks.add_(-(-num_tokens // BLOCK_TOKENS))
        at.l1_L.add_(torch.stack([s.l1_sum.detach() for s in stats]))
        at.nnz_L.add_(nnz_LM.sum(1))
        at.union_L.add_(union_L)
        at.recomputed.add_((union_L > capacity_L).sum())
        for s in stats:
            if s.recomputed is not None:
                at.recomputed.add_(s.recomputed > 0)
        torch.maximum(at.largest_union_L, union_L, out=at.largest_union_L)
        self.active_LN.add_(torch.stack(active))
        self.histogram_LC.scatter_add_(1, nnz_LM, self._one.expand_as(nnz_LM))

    @property
    def num_tokens(self) -> Tensor:
        """() int64, on the device."""
        return self._at.num_tokens[0].long()

    def reduce(self, group: Group) -> None:
        """Sums over ranks, in place."""
        all_reduce_sum(self._buffer[self._num_layers :], group)

    def send(self) -> None:
        """Begins the copy to the host."""
        self._copy = self._read.to("cpu", non_blocking=True)
        on_gpu = self._read.is_cuda
        self._arrived = torch.cuda.current_stream().record_event() if on_gpu else None

    def read(self) -> StepNumbers:
        """The numbers that were sent; waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        at = _Slices(*self._copy.split(self._sizes))
        tokens = int(at.num_tokens)
        return StepNumbers(
            num_tokens=tokens,
            l1_L=(at.l1_L / max(tokens, 1)).tolist(),
            nnz_L=(at.nnz_L / max(tokens, 1)).tolist(),
            union_L=(at.union_L / at.num_blocks.clamp(min=1)).tolist(),
            recomputed=int(at.recomputed),
            largest_union_L=at.largest_union_L.long().tolist(),
        )


@dataclass(frozen=True)
class SparsityStatistics:
    """A step's numbers over all ranks; lists run over the layers, in the model's order."""

    step: int  # 1 is the first
    num_tokens: int
    l1: float  # Σ|h| as in `l1_loss`, mean over tokens and layers
    l1_coefficient: list[float]  # λ
    nnz_mean: list[float]  # neurons active for a token
    nnz_p50: list[int]
    nnz_p99: list[int]
    nnz_max: list[int]
    dead_fraction: list[float]  # neurons inactive for `dead_window_tokens` or longer
    union_mean: list[float]  # neurons active for at least one of 64 neighbouring tokens
    sparse: list[bool]  # computed by the sparse kernels
    recomputed: int  # patterns that did not fit, which the backward pass recomputed
    target_error: float | None  # smoothed non-zeros over the target, minus one


class NnzStatistics(NamedTuple):
    """The non-zeros per token of each layer."""

    nnz_mean: list[float]
    nnz_p50: list[int]
    nnz_p99: list[int]
    nnz_max: list[int]


def nnz_statistics(histogram_LC: NDArray[np.integer | np.floating]) -> NnzStatistics:
    """Mean, percentiles and maximum of the non-zeros per token, by layer.

    A percentile is the nearest rank: the smallest count that so many percent of the tokens do not
    exceed; the maximum is that of 100 percent.

    Args:
        histogram_LC: number of tokens with each number of non-zeros, whole numbers.
    """
    tokens_LC = histogram_LC.astype(np.int64, copy=False)
    num_tokens, counts_C = tokens_LC[0].sum(), np.arange(tokens_LC.shape[1])
    cumulative_LC = tokens_LC.cumsum(1)
    ranks = [(num_tokens * percent + 99) // 100 for percent in (50, 99, 100)]
    percentiles = [(cumulative_LC < rank).sum(1).tolist() for rank in ranks]
    mean_L = (tokens_LC * counts_C).sum(1) / max(num_tokens, 1)
    return NnzStatistics(mean_L.tolist(), *percentiles)


class NeuronActivity:
    """How long each neuron has been silent, and how often it was active in the last window.

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
    def advance(self, active_LN: Tensor, num_tokens: int | Tensor, refused: Tensor) -> None:
        """Adds a step, unless it is refused; the host does not wait for that.

        Args:
            active_LN: number of tokens, of all ranks, for which each neuron was active.
            num_tokens: of the step, over all ranks.
            refused: (), not zero if the step does not count.
        """
        accepted = refused == 0
        active_LN, tokens = (active_LN * accepted).long(), accepted * num_tokens
        silent = active_LN == 0
        self.silent_tokens_LN = torch.where(silent, self.silent_tokens_LN + tokens, 0)
        self.window_fired_LN += active_LN
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

    def move_to(self, device: torch.device) -> None:
        """Moves the numbers to the device where the steps will be counted."""
        for name in _STATE:
            setattr(self, name, getattr(self, name).to(device))

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
