"""Where a run's numbers go: a progress line, a local JSONL, and the same numbers to wandb.

``<run>/metrics.jsonl`` holds one object a line: ``kind`` is ``train``, ``validation`` or
``evaluation``, ``step`` counts finished optimizer steps, ``tokens`` the training tokens seen, which
is wandb's x axis.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from typing import IO, Any

from sparsellm.recipe import Recipe
from sparsellm.runs.files import write_atomically
from sparsellm.runs.metrics import LAYER_METRICS, METRICS, Line, mean
from sparsellm.runs.records import (
    METRICS_FILE,
    EvaluationRecord,
    FailureRecord,
    Record,
    StepStats,
    ValidationRecord,
    nnz_bucket_edges,
    position_bucket_starts,
    whole_lines,
)

WANDB_ID_FILE = "wandb_id"


class MetricsLog:
    """Writes records of the main rank; on other ranks nothing is ever called.

    Args:
        recipe: the run; its folder gets the files.
        resume_step: records after this step are dropped: they will be computed again.
    """

    def __init__(self, recipe: Recipe, resume_step: int) -> None:
        self._recipe = recipe
        path = recipe.run_path / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        written = whole_lines(path) if path.is_file() else []
        kept = [line for line, record in written if record["step"] <= resume_step]
        write_atomically(path, "".join(kept))
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._wandb = start_wandb(recipe) if recipe.logging.wandb != "disabled" else None

    def write(self, record: Record) -> None:
        """Adds a record to the JSONL and to wandb."""
        self._file.write(json.dumps(record.line()) + "\n")
        self._file.flush()
        self._try_wandb(lambda run: run.log(wandb_values(record, self._recipe)))

    def sync(self) -> None:
        """Makes the records durable; called before each checkpoint, which must not outlive them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Makes the records durable and ends the wandb run."""
        try:
            self.sync()
            self._file.close()
        finally:
            self._try_wandb(lambda run: run.finish())

    def _try_wandb(self, action: Callable[[Any], None]) -> None:
        """A dashboard that fails does not end the training that it shows."""
        if self._wandb is None:
            return
        try:
            action(self._wandb)
        except Exception as error:  # wandb raises its own errors and those of its sockets
            self._wandb = None
            print(
                f"warning: wandb stopped ({type(error).__name__}: {error}); "
                f"{METRICS_FILE} has the numbers, and wandb again after a resume",
                file=sys.stderr,
                flush=True,
            )


def check_wandb(recipe: Recipe) -> None:
    """Before anything of a run is written.

    Raises:
        ValueError: the recipe wants wandb online, and nobody is logged in.
    """
    if recipe.logging.wandb != "online":
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ValueError(
            "logging.wandb is online and wandb knows no API key: run `wandb login`, set "
            "WANDB_API_KEY, or choose --set logging.wandb=offline"
        )


def start_wandb(recipe: Recipe) -> Any:
    """The wandb run of a training run, the same one every time.

    Raises:
        ValueError: wandb cannot start it.
    """
    import wandb

    id_file = recipe.run_path / WANDB_ID_FILE
    if not id_file.is_file():
        write_atomically(id_file, secrets.token_hex(4))
    try:
        run = wandb.init(
            project=recipe.logging.wandb_project,
            name=recipe.name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",  # the same run goes on after a restart
            mode=recipe.logging.wandb,
            dir=str(recipe.run_path),
            config=recipe.model_dump(mode="json"),
        )
    except wandb.Error as error:
        raise ValueError(
            f"wandb did not start: {error}; --set logging.wandb=offline trains without a network, "
            "`wandb sync` sends it later"
        ) from error
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    run.define_metric("validation/loss", step_metric="tokens", summary="min")
    return run


def wandb_values(record: Record, recipe: Recipe) -> dict[str, Any]:
    """What is logged to wandb of a record."""
    base = {"tokens": record.tokens, "step": record.step}
    if isinstance(record, ValidationRecord):
        return base | {"validation/loss": record.loss, "validation/targets": record.num_targets}
    if isinstance(record, EvaluationRecord):
        scores = {
            f"evaluation/{name}/{metric}": score[metric]
            for name, score in record.tasks.items()
            for metric in ("acc", "acc_norm")
        }
        values = {"evaluation/mean": record.mean, **scores}
        return base | {key: value for key, value in values.items() if value is not None}
    if isinstance(record, FailureRecord):
        return base | {f"{record.what}/failed": 1}
    return base | _wandb_step(record.line(), record.sparsity, recipe)


def _wandb_step(line: Line, stats: StepStats, recipe: Recipe) -> dict[str, Any]:
    import numpy as np
    import wandb

    layers = recipe.model.num_hidden_layers
    edges = nnz_bucket_edges(recipe.model.intermediate_size)
    starts = position_bucket_starts(recipe.model.context_length)

    def histogram(counts: list[float] | list[int], edges: list[int]) -> Any:
        return wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))

    found: dict[str, Any] = {}
    for metric in METRICS:
        value = metric.value(line, recipe)
        if value is not None:
            found[metric.wandb_key] = value
    for by_layer in LAYER_METRICS:
        values = by_layer.of(line)
        found |= {f"layers/{by_layer.name}/{i:02d}": value for i, value in enumerate(values)}
        if by_layer.histogram:
            # wandb draws a histogram logged at every step as a heatmap over training: one bin per
            # layer, whose "count" is the value of that layer.
            found[by_layer.histogram] = histogram(values, list(range(layers + 1)))
    found["sparsity/nnz_per_token"] = histogram(
        stats.nnz_histogram, [*edges, recipe.model.intermediate_size + 1]
    )
    for start, of_layers in zip(starts, zip(*stats.nnz_by_position, strict=True), strict=True):
        found[f"positions/nnz/{start:05d}"] = mean(list(of_layers))
    return found
