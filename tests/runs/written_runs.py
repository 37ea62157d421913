"""Run folders as training writes them, with numbers that are made up."""

import json
from typing import Any

from sparsellm.runs.telemetry.metrics import METRICS
from sparsellm.runs.telemetry.records import (
    KernelStats,
    StepStats,
    TrainRecord,
    nnz_bucket_edges,
    position_bucket_starts,
)


def train_record(recipe, step: int) -> TrainRecord:
    """The record of a step."""
    layers = range(recipe.model.num_hidden_layers)
    buckets = len(position_bucket_starts(recipe.model.context_length))
    edges = nnz_bucket_edges(recipe.model.intermediate_size)
    return TrainRecord(
        step=step,
        tokens=step * recipe.train.global_batch_tokens,
        values=dict.fromkeys((m.name for m in METRICS if m.of is None), 0.0)
        | {
            "loss": 5.0 / step,
            "l1": 0.5 / step,
            "l1_coefficient": 0.02,
            "target_error": None,
            "learning_rate": 1e-3,
            "grad_norm": 1.5,
            "skipped_steps": 0,
            "tokens_per_second": 12_345.0,
            "step_ms": 1e3 * recipe.train.global_batch_tokens / 12_345,
            "mfu": None,
            "mfu_dense": None,
            "memory_gib": 1.25,
            "micro_batch_size": 2,
            "seconds": float(step),
            "train_seconds": 0.5 * step,
            "compile_seconds": 1.5,
        },
        l1_by_layer=[0.02 for _ in layers],
        sparsity=StepStats(
            nnz_mean=[10.0 / step + layer for layer in layers],
            nnz_max=[20 for _ in layers],
            nnz_p50=[8 for _ in layers],
            nnz_p99=[19 for _ in layers],
            dead_fraction=[0.25 * layer for layer in layers],
            nnz_by_position=[[float(b) for b in range(buckets)] for _ in layers],
            nnz_histogram=[3, 1] + [0] * (len(edges) - 2),
        ),
        kernels=KernelStats([layer > 0 for layer in layers], [20.0 + layer for layer in layers]),
    )


def record(recipe, step: int, **changes: Any) -> dict[str, Any]:
    """The line of a step in metrics.jsonl."""
    return train_record(recipe, step).line() | changes


def write_run(recipe, records):
    """A run folder without checkpoints."""
    recipe.run_path.mkdir(parents=True, exist_ok=True)
    (recipe.run_path / "recipe.yaml").write_text(recipe.to_yaml())
    lines = "".join(json.dumps(line) + "\n" for line in records)
    (recipe.run_path / "metrics.jsonl").write_text(lines)
    return recipe.run_path
