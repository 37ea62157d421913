"""The sizes of a step's counters, and the metrics that are among them.

A metric of `runs.telemetry.metrics` that has a `Counter` is counted, summed, read and recorded by
this alone. L layers, T context_length, P position buckets.
"""

import torch

from sparsellm.recipe import Recipe
from sparsellm.runs.telemetry.metrics import LAYER_METRICS, METRICS, LayerMetric, Metric
from sparsellm.runs.telemetry.records import nnz_bucket_edges, position_bucket_starts


class CounterLayout:
    """The sizes of a run's counters.

    Args:
        recipe: of the run.
        device: where the counters live.
        num_corpora: that the run reads.
    """

    def __init__(self, recipe: Recipe, device: torch.device, num_corpora: int = 1) -> None:
        model = recipe.model
        self.num_layers, self.num_neurons = model.num_hidden_layers, model.intermediate_size
        self.global_tokens = recipe.train.global_batch_tokens
        starts = position_bucket_starts(model.context_length)
        ends = [*starts[1:], model.context_length]
        sequences = self.global_tokens // model.context_length
        self.position_tokens_P = [
            sequences * (end - start) for start, end in zip(starts, ends, strict=True)
        ]
        self.nnz_edges = nnz_bucket_edges(self.num_neurons)
        positions = torch.arange(model.context_length, device=device)
        starts_P = torch.tensor(starts, device=device)
        self.bucket_T = torch.bucketize(positions, starts_P, right=True) - 1
        num_layers = self.num_layers
        # Metrics that are counted: their sizes, and what their sums are divided by.
        metrics: list[Metric | LayerMetric] = [*METRICS, *LAYER_METRICS]
        self.counters = {metric: metric.counter for metric in metrics if metric.counter}
        self.metric_sizes = [
            num_layers if isinstance(metric, LayerMetric) else 1 for metric in self.counters
        ]
        divisors = {
            "sum": 1,
            "per_token": self.global_tokens,
            "per_token_and_layer": self.global_tokens * num_layers,
        }
        self.divisors = [divisors[counter.reduction] for counter in self.counters.values()]
        by_position = num_layers * len(starts)
        # The order of `counters._Slices`: of this rank alone, then summed over ranks. A copy of the
        # beginning is enough for the host: the histogram follows for logged steps, the rest never.
        local = [num_layers, num_layers, 1, 1]
        self.num_local = sum(local)
        self.num_flags = 2 + 2 * num_corpora
        by_layer = [num_layers, num_layers, by_position]
        self.slices = [*local, self.num_flags, 1, sum(self.metric_sizes), 1, *by_layer]
        self.num_read = sum(self.slices)
        self.num_logged = self.num_read + num_layers * (self.num_neurons + 1)
        self.num_all = self.num_logged + num_layers * self.num_neurons
