"""Counts patterns batch by batch: a million tokens need no more memory than one batch.

Shapes: M tokens of a batch, in order; N neurons; C numbers of non-zeros; V token ids.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsellm.ffn.types import TILE_NEURONS
from sparsellm.sparsity.counts import nnz_statistics

UNION_TOKENS = (64, 128, 256)  # each divides the last
HOT_NEURONS = (128, 256, 512, 1024)


class LayerTally:
    """All counts of one layer.

    Args:
        num_neurons: N.
        device: where patterns are and counters live.
    """

    def __init__(self, num_neurons: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        self._histogram_C = zeros(num_neurons + 1)
        self._activity_N = zeros(num_neurons)
        self._tile_max = zeros(1)
        self._union_sums = {tokens: zeros(1) for tokens in UNION_TOKENS}
        self._tokens = 0
        # Rows that do not fill the largest block yet.
        self._rest = torch.zeros(0, num_neurons, dtype=torch.bool, device=device)

    def update(self, active_MN: Tensor) -> Tensor:
        """Counts a batch; returns its non-zeros per token, (M,) int64."""
        nnz_M = active_MN.sum(1)
        self._histogram_C += torch.bincount(nnz_M, minlength=len(self._histogram_C))
        self._activity_N += active_MN.sum(0)
        missing = -active_MN.shape[1] % TILE_NEURONS
        tiles = torch.nn.functional.pad(active_MN, (0, missing)).unflatten(1, (-1, TILE_NEURONS))
        self._tile_max = torch.maximum(self._tile_max, tiles.sum(2).max())
        self._tokens += len(active_MN)
        rows = torch.cat([self._rest, active_MN])
        whole = len(rows) // UNION_TOKENS[-1] * UNION_TOKENS[-1]
        self._add_unions(rows[:whole])
        self._rest = rows[whole:].clone()
        return nnz_M

    def _add_unions(self, rows: Tensor) -> None:
        for tokens in UNION_TOKENS:
            blocks, left = divmod(len(rows), tokens)
            whole = rows[: blocks * tokens].reshape(blocks, tokens, rows.shape[1])
            self._union_sums[tokens] += whole.any(1).sum()
            if left:
                self._union_sums[tokens] += rows[-left:].any(0).sum()

    def statistics(self) -> dict[str, Any]:
        """The counts as JSON values; no batch may be added afterwards."""
        self._add_unions(self._rest)
        self._rest = self._rest[:0]
        nnz = nnz_statistics(self._histogram_C[None].cpu().numpy())
        popular_N = self._activity_N.sort(descending=True).values
        num_active = max(int(popular_N.sum()), 1)
        return {
            **{name: value for name, [value] in nnz._asdict().items()},
            "tile_max": int(self._tile_max),
            "never_fired_fraction": float((self._activity_N == 0).double().mean()),
            "union": {
                str(tokens): int(total) / -(-self._tokens // tokens)
                for tokens, total in self._union_sums.items()
            },
            "hot_share": {str(top): int(popular_N[:top].sum()) / num_active for top in HOT_NEURONS},
        }


class TokenTally:
    """Mean non-zeros of each token id, over layers and occurrences.

    Args:
        vocab_size: V.
        device: where the counters live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._nnz_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        self._occurrences_V = torch.zeros(vocab_size, dtype=torch.int64, device=device)

    def update(self, token_M: Tensor, nnz_M: Tensor) -> None:
        """Counts a batch: its ids, and non-zeros as means over layers."""
        self._nnz_V.index_add_(0, token_M, nnz_M.double())
        self._occurrences_V.index_add_(0, token_M, torch.ones_like(token_M))

    def extremes(self, num: int, min_count: int) -> tuple[list[tuple[int, float, int]], ...]:
        """The ids with the fewest and with the most non-zeros on average.

        Args:
            num: how many of each end.
            min_count: rarer ones are left out: their mean is noise.

        Returns:
            Lowest and highest, as (token id, mean non-zeros, occurrences), most extreme first.
        """
        common = (self._occurrences_V >= max(min_count, 1)).nonzero()[:, 0]
        mean_V = self._nnz_V / self._occurrences_V
        order = common[mean_V[common].argsort(stable=True)]

        def entries(ids: Tensor) -> list[tuple[int, float, int]]:
            columns = ids, mean_V[ids], self._occurrences_V[ids]
            return list(zip(*(column.tolist() for column in columns), strict=True))

        return entries(order[:num]), entries(order.flip(0)[:num])
