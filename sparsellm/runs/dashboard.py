"""wandb: receives each record of metrics.jsonl once, and never delays or stops training."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import secrets
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import RootModel

from sparsellm.recipe import Recipe
from sparsellm.runs.evaluations import task_metrics
from sparsellm.runs.files import read_model, warn, write_atomically
from sparsellm.runs.metrics import LAYER_METRICS, METRICS, Line, mean
from sparsellm.runs.records import (
    EvaluationRecord,
    FailureRecord,
    Record,
    StepStats,
    ValidationRecord,
    nnz_bucket_edges,
    position_bucket_starts,
)

WANDB_ID_FILE = "wandb_id"
SENT_FILE = "wandb_sent.json"  # the last step of each kind of record that wandb has
START_SECONDS = 30  # in which wandb must answer
RETRY_SECONDS = 60.0  # doubled up to ten minutes
CLOSE_SECONDS = 60.0  # for which the end of a run waits for unsent records


class _Sent(RootModel[dict[str, int]]):
    """The content of `SENT_FILE`."""


def read_sent(file: Path) -> dict[str, int]:
    """The last step of each kind of record that wandb has; empty if nothing was sent.

    Raises:
        ValueError: the file is damaged.
    """
    if not file.is_file():
        return {}
    return read_model(file, _Sent, "delete it, and wandb gets all records again")


class Dashboard:
    """Sends records from a separate thread; while wandb fails, they are queued and sent later.

    Args:
        recipe: the run; its folder gets wandb's files.
        written: the records already in metrics.jsonl; those that wandb lacks are sent now.
        branch: the run goes back, on purpose, to before what wandb has: a new wandb run gets all
            records. Otherwise steps that are computed again, with the same numbers, are not sent
            again.
    """

    def __init__(self, recipe: Recipe, written: Iterable[Record], branch: bool) -> None:
        self._recipe = recipe
        self._sent_file = recipe.run_path / SENT_FILE
        if branch:
            for file in (recipe.run_path / WANDB_ID_FILE, self._sent_file):
                file.unlink(missing_ok=True)
        self._sent = read_sent(self._sent_file)
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._waiting: list[Record] = []
        self._run: Any = None
        self._next_try, self._retry = 0.0, RETRY_SECONDS
        for record in written:
            self._queue.put(record)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, record: Record) -> None:
        """Queues a record; returns at once."""
        self._queue.put(record)

    def close(self) -> None:
        """Waits until everything is sent, but not long: a dashboard must not keep a job alive."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            warn(f"wandb still sends; `wandb sync {self._recipe.run_path}/wandb/*` does the rest")

    def _work(self) -> None:
        ended = False
        while not ended:
            ended = self._take()
            if self._waiting and time.monotonic() >= self._next_try:
                self._try(self._recipe.logging.wandb)
        if self._waiting:
            # Kept where `wandb sync` finds them.
            number = len(self._waiting)
            self._try("offline")
            if not self._waiting:
                warn(
                    f"wandb was out of reach for {number} records; "
                    f"`wandb sync {self._recipe.run_path}/wandb/offline-run-*` sends them"
                )
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                warn(f"wandb did not end well ({type(error).__name__}: {error})")

    def _take(self) -> bool:
        """Moves queued records to the unsent ones; True at the end of the run."""
        wait = max(self._next_try - time.monotonic(), 0.05) if self._waiting else None
        try:
            record = self._queue.get(timeout=wait)
            while record is not None:
                if record.step > self._sent.get(record.kind, -1):
                    self._waiting.append(record)
                record = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _try(self, mode: str) -> None:
        try:
            if self._run is None:
                self._run = start_wandb(self._recipe, mode)
            while self._waiting:
                self._run.log(wandb_values(self._waiting[0], self._recipe))
                record = self._waiting.pop(0)
                self._sent[record.kind] = record.step
        except Exception as error:  # wandb raises its own errors and those of its sockets
            self._run = None
            _end_wandb()
            self._next_try = time.monotonic() + self._retry
            self._retry = min(2 * self._retry, 600.0)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            warn(f"wandb is out of reach ({reason[:300]}); its records wait, training goes on")
        else:
            self._retry = RETRY_SECONDS
            self._mark()

    def _mark(self) -> None:
        try:
            write_atomically(self._sent_file, json.dumps(self._sent) + "\n")
        except OSError as error:
            warn(f"{self._sent_file} cannot be written: {error}")


def _end_wandb() -> None:
    """Ends wandb's process, which would otherwise refuse to start the same run again."""
    if wandb := sys.modules.get("wandb"):
        with contextlib.suppress(Exception):
            wandb.teardown()


def check_wandb(recipe: Recipe) -> None:
    """Checks wandb's settings, before anything of a run is written.

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


def start_wandb(recipe: Recipe, mode: str | None = None) -> Any:
    """The wandb run of a training run, the same one every time. ``mode`` is else the recipe's.

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
            resume="allow",  # a restart continues the same wandb run
            mode=mode or recipe.logging.wandb,  # type: ignore[arg-type]
            dir=str(recipe.run_path),
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(init_timeout=START_SECONDS, reinit="create_new"),
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
    """The values of a record that are logged to wandb."""
    base = {"tokens": record.tokens, "step": record.step}
    if isinstance(record, ValidationRecord):
        by_corpus = {f"validation/loss_{name}": loss for name, loss in record.by_corpus.items()}
        targets = {"validation/targets": record.num_targets}
        loss = {} if math.isnan(record.loss) else {"validation/loss": record.loss}
        return base | loss | targets | by_corpus
    if isinstance(record, EvaluationRecord):
        scores = {
            f"evaluation/{name}/{metric}": value
            for name, score in record.tasks.items()
            for metric, value in task_metrics(score).items()
        }
        mean = {} if record.mean is None else {"evaluation/mean": record.mean}
        return base | mean | scores
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
        values = by_layer.values(line)
        found |= {f"layers/{by_layer.name}/{i:02d}": value for i, value in enumerate(values)}
        if by_layer.histogram and values:
            # wandb draws a histogram logged at every step as a heatmap over training: one bin per
            # layer, whose "count" is the value of that layer.
            found[by_layer.histogram] = histogram(values, list(range(layers + 1)))
    if stats.nnz_histogram:
        bounds = [*edges, recipe.model.intermediate_size + 1]
        found["sparsity/nnz_per_token"] = histogram(stats.nnz_histogram, bounds)
    if stats.nnz_by_position:
        for start, of_layers in zip(starts, zip(*stats.nnz_by_position, strict=True), strict=True):
            found[f"positions/nnz/{start:05d}"] = mean(list(of_layers))
    return found
