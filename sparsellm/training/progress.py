"""The progress line of a training run."""

from __future__ import annotations

from sparsellm.recipe import Recipe
from sparsellm.runs.records import TrainRecord


def progress_line(record: TrainRecord, recipe: Recipe) -> str:
    """One line for people, under 160 columns."""
    total = recipe.train.steps
    n = recipe.model.intermediate_size
    remaining = (total - record.step) * recipe.train.global_batch_tokens
    mfu = "" if record.mfu is None else f" | mfu {record.mfu:5.1%}"
    return (
        f"step {record.step:>{len(str(total))}}/{total}"
        f" | loss {record.loss:.4f}"
        f" | l1 {record.l1:.3g}"
        f" | nnz {record.sparsity.mean_nnz:.1f} ({record.sparsity.mean_nnz / n:.2%})"
        f" | dead {record.sparsity.mean_dead_fraction:.1%}"
        f" | {_si(record.tokens_per_second)} tok/s{mfu}"
        f" | mem {record.memory_gib:.1f} GiB"
        f" | eta {_duration(remaining / record.tokens_per_second)}"
    )


def _si(value: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
