"""What a step counts: added up on the device, summed over ranks once, read by the host once.

All counters are slices of one float64 buffer, which adds integers exactly up to 2^53. The copy to
the host begins before the optimizer's update and the host waits for it afterwards: while the GPU
updates the weights, the host prepares the next step.

L layers, N intermediate_size, T context_length, P position buckets, C = N + 1: the numbers of
non-zeros that a token can have.
"""

import sys
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import BLOCK_TOKENS
from sparsellm.runs.telemetry.metrics import LayerMetric, Metric
from sparsellm.runs.telemetry.records import KernelStats, StepStats
from sparsellm.sparsity.counts import nnz_statistics
from sparsellm.sparsity.over_ranks import all_reduce_sum
from sparsellm.training.counting.layout import CounterLayout
from sparsellm.training.objective import LossSums

Values = TypeVar("Values")

_NO_LIMIT = sys.float_info.max  # no finite number exceeds it; infinity and NaN are refused
_NEVER = 2**62  # columns: a capacity that nothing overflows
DECAY = 0.98  # of the moving averages: they remember about 50 steps
SETTLED_STEPS = 50  # that must be averaged before a step can be a spike


@dataclass(frozen=True)
class StepReading:
    """The numbers of one step over all ranks."""

    metrics: dict[str, float]  # those of `METRICS` that are counted, by name
    layer_metrics: dict[str, list[float]]  # likewise of `LAYER_METRICS`
    gradient_norm: float  # before clipping
    stop: bool  # some rank was asked to stop
    failed: bool  # some rank could not read its data, so the step does not count
    refused: bool  # the weights stayed as they were
    epochs_C: list[float]  # how often each corpus's text had been read before, mean of sequences
    nnz_L: list[float]  # non-zeros per token
    largest_union_L: list[int]  # columns, of this rank's micro-batches
    kernels: KernelStats
    sparsity: StepStats | None  # if the step is logged and was taken


class _Slices(NamedTuple, Generic[Values]):
    """The counters that the host reads in every step.

    Those of metrics are declared in `runs.telemetry.metrics`; the others steer the step.
    """

    # Of this rank; not summed over ranks.
    dead_L: Values  # neurons, set where the step is logged
    largest_union_L: Values
    gradient_norm: Values
    refused: Values
    # Summed over ranks.
    # Ranks that were asked to stop; ranks without data; `MicroBatchReader.texts_2C`, flattened.
    flags: Values
    objections: Values  # ranks whose gradient norm is over its limit
    metrics: Values  # those of `CounterLayout.counters`, flattened
    recomputed: Values
    overflows_L: Values
    union_L: Values
    nnz_LP: Values  # flattened


class Counters:
    """The counters of one step.

    Args:
        layout: of the run.
        ffns: of each layer.
        num_tokens: of a micro-batch.
        num_micro_batches: of the step, over all ranks.
    """

    def __init__(
        self, layout: CounterLayout, ffns: list[SparseFFN], num_tokens: int, num_micro_batches: int
    ) -> None:
        device = layout.bucket_T.device
        self._layout = layout
        self._num_blocks = -(-num_tokens // BLOCK_TOKENS) * num_micro_batches
        capacities = [ffn.capacity_for(num_tokens) for ffn in ffns]
        self._sparse = [capacity is not None for capacity in capacities]
        # TwELL itself counts what it has no room for (`LossSums.recomputed`).
        fits = [
            capacity if capacity is not None and ffn.format == "union" else _NEVER
            for ffn, capacity in zip(ffns, capacities, strict=True)
        ]
        self._capacity_L = torch.tensor(fits).to(device, non_blocking=True)
        self._buffer = torch.zeros(layout.num_all, dtype=torch.float64, device=device)
        self._at = _Slices(*self._buffer[: layout.num_read].split(layout.slices))
        self._nnz_LP = self._at.nnz_LP.view(layout.num_layers, -1)
        self._metrics = self._at.metrics.split(layout.metric_sizes)
        by_name = dict(zip((m.name for m in layout.counters), self._metrics, strict=True))
        self._cross_entropy, self._l1 = by_name["loss"], by_name["l1"]
        histogram = self._buffer[layout.num_read : layout.num_logged]
        self._histogram_LC = histogram.view(layout.num_layers, -1)
        self.active_LN = self._buffer[layout.num_logged :].view(layout.num_layers, -1)
        self._one = torch.ones((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, sums: LossSums) -> None:
        """Adds one micro-batch of this rank."""
        at = self._at
        for counter, total in zip(self._layout.counters.values(), self._metrics, strict=True):
            total.add_(counter.of(sums))
        at.union_L.add_(sums.union_L)
        at.overflows_L.add_(sums.union_L > self._capacity_L)
        if sums.recomputed is not None:
            at.recomputed.add_(sums.recomputed)
        torch.maximum(at.largest_union_L, sums.union_L, out=at.largest_union_L)
        nnz_LT = sums.nnz_LBT.sum(1, dtype=torch.float64)
        self._nnz_LP.index_add_(1, self._layout.bucket_T, nnz_LT)
        nnz_LM = sums.nnz_LBT.flatten(1).long()
        self._histogram_LC.scatter_add_(1, nnz_LM, self._one.expand_as(nnz_LM))
        self.active_LN.add_(sums.active_LN)

    @torch.no_grad()
    def reduce(
        self,
        gradient_norm: Tensor,
        limits: dict[str, float],
        *,
        stop: bool,
        failed: bool,
        texts_2C: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Sums over ranks, and decides on the device whether the step must not be taken.

        All ranks decide alike, since they decide by sums. The host does not wait.

        Args:
            gradient_norm: () before clipping.
            limits: see `SkippedSteps.limits`.
            stop: this rank was asked to stop.
            failed: this rank had no data.
            texts_2C: of this rank, see `MicroBatchReader`.

        Returns:
            () fp32: 1 if a rank had no data, or a value is not finite or over its limit; else 0.
        """
        at = self._at
        # Numbers that are assigned one by one would each wait for the device.
        flags = np.zeros(self._layout.num_flags)
        flags[:2] = stop, failed
        if texts_2C is not None:
            flags[2:] = texts_2C.ravel()
        at.flags.copy_(torch.from_numpy(flags), non_blocking=True)
        at.gradient_norm.copy_(gradient_norm)
        at.objections.copy_(~(at.gradient_norm <= limits["gradient norm"]))
        all_reduce_sum(self._buffer[self._layout.num_local :])
        accepted = at.flags[1:2] + at.objections == 0
        accepted &= self._cross_entropy / self._layout.global_tokens <= limits["loss"]
        accepted &= self._l1 <= _NO_LIMIT
        at.refused.copy_(~accepted)
        return at.refused[0].float()

    @torch.no_grad()
    def send(self, dead_LN: Tensor | None) -> None:
        """Begins the copy to the host, after `reduce`.

        Args:
            dead_LN: bool, where the step is logged.
        """
        end = self._layout.num_read
        if dead_LN is not None:
            end = self._layout.num_logged
            self._at.dead_L.copy_(dead_LN.sum(1))
        self._copy = self._buffer[:end].to("cpu", non_blocking=True)
        on_gpu = self._buffer.is_cuda
        self._arrived = torch.cuda.current_stream().record_event() if on_gpu else None

    def read(self) -> StepReading:
        """The numbers that were sent. Only here does a step wait for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        layout, copy = self._layout, self._copy.numpy()
        tokens, num_layers = layout.global_tokens, layout.num_layers
        at = _Slices(*np.split(copy[: layout.num_read], np.cumsum(layout.slices)[:-1]))
        nnz_LP = at.nnz_LP.reshape(num_layers, -1)
        num_sequences_C, epochs_C = at.flags[2:].reshape(2, -1)
        refused, sparsity = bool(at.refused[0]), None
        # A step that is not logged is sent without its histogram.
        if len(copy) > layout.num_read and not refused:
            histogram_LC = copy[layout.num_read :].reshape(num_layers, -1).astype(np.int64)
            sparsity = StepStats(
                **nnz_statistics(histogram_LC)._asdict(),
                dead_fraction=(at.dead_L / layout.num_neurons).tolist(),
                nnz_by_position=(nnz_LP / layout.position_tokens_P).tolist(),
                nnz_histogram=np.add.reduceat(histogram_LC.sum(0), layout.nnz_edges).tolist(),
            )
        sums = np.split(at.metrics, np.cumsum(layout.metric_sizes)[:-1])
        metrics = zip(layout.counters, sums, layout.divisors, strict=True)
        values = [(metric, (total / divisor).tolist()) for metric, total, divisor in metrics]
        return StepReading(
            metrics={metric.name: v[0] for metric, v in values if isinstance(metric, Metric)},
            layer_metrics={m.name: v for m, v in values if isinstance(m, LayerMetric)},
            gradient_norm=float(at.gradient_norm[0]),
            stop=bool(at.flags[0] > 0),
            failed=bool(at.flags[1] > 0),
            refused=refused,
            epochs_C=(epochs_C / np.maximum(num_sequences_C, 1)).tolist(),
            nnz_L=(nnz_LP.sum(1) / tokens).tolist(),
            largest_union_L=at.largest_union_L.astype(int).tolist(),
            kernels=KernelStats(
                self._sparse,
                (at.union_L / self._num_blocks).tolist(),
                int(at.overflows_L.sum() + at.recomputed[0]),
            ),
            sparsity=sparsity,
        )


class SkippedSteps:
    """How many steps were skipped, and moving averages of those taken, which show spikes.

    A damaged batch can raise loss and gradient norm by orders of magnitude while they stay finite.
    With ``train.spike_threshold`` the update of such a step, a spike, is skipped. The averages are
    exponential, and corrected for their bias towards zero.
    """

    def __init__(self) -> None:
        self.total = self.in_a_row = 0
        self._steps = 0  # taken
        self._sums = {"loss": 0.0, "gradient norm": 0.0}

    def skip(self) -> None:
        """Counts a step that was skipped."""
        self.total += 1
        self.in_a_row += 1

    def take(self, loss: float, gradient_norm: float) -> None:
        """Counts a step that was taken."""
        self.in_a_row = 0
        self._steps += 1
        for name, value in (("loss", loss), ("gradient norm", gradient_norm)):
            self._sums[name] = DECAY * self._sums[name] + (1 - DECAY) * value

    def limits(self, threshold: float | None) -> dict[str, float]:
        """What a step must not exceed: ``threshold`` times the averages, once there are enough.

        Until then it is the largest number, which nothing finite exceeds.
        """
        if threshold is None or self._steps < SETTLED_STEPS:
            return dict.fromkeys(self._sums, _NO_LIMIT)
        weight = 1 - DECAY**self._steps
        limits = {name: threshold * value / weight for name, value in self._sums.items()}
        return {name: limit if limit > 0 else _NO_LIMIT for name, limit in limits.items()}

    def spikes(self, values: dict[str, float], threshold: float) -> list[str]:
        """What exceeds its limit, as text."""
        return [
            f"{name} {values[name]:.4g} is {threshold * values[name] / limit:.3g} times its "
            f"average {limit / threshold:.4g}"
            for name, limit in self.limits(threshold).items()
            if values[name] > limit
        ]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, under their keys in a checkpoint; JSON keeps every bit of them."""
        averages = {"steps": self._steps, "sums": dict(self._sums)}
        return {"skipped": self.total, "skipped_in_a_row": self.in_a_row, "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.total, self.in_a_row = state["skipped"], state["skipped_in_a_row"]
        self._steps, sums = state["averages"]["steps"], state["averages"]["sums"]
        self._sums = {name: sums[name] for name in self._sums}
