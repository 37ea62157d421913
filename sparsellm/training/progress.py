"""The progress line of a training run."""

from __future__ import annotations

from sparsellm.recipe import Recipe
from sparsellm.runs.metrics import METRICS
from sparsellm.runs.records import TrainRecord


def progress_line(record: TrainRecord, recipe: Recipe) -> str:
    """A progress line of under 160 columns."""
    total, line = recipe.train.steps, record.line()
    shown = [(m, m.value(line, recipe)) for m in METRICS if m.progress]
    parts = [text for m, value in shown if value is not None and (text := m.text(value))]
    rate = record.values["tokens_per_second"]
    assert rate is not None
    remaining = (total - record.step) * recipe.train.global_batch_tokens
    head = f"step {record.step:>{len(str(total))}}/{total}"
    text = " | ".join([head, *parts, f"eta {_duration(remaining / rate)}"])
    return text.replace(" | (", " (")  # a share stands behind its number


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
