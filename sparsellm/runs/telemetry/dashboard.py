"""wandb: receives each record of metrics.jsonl once, and never delays or stops training."""

import contextlib
import json
import math
import queue
import secrets
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic import RootModel

from sparsellm.recipe import Recipe
from sparsellm.recipe.strict import read_model
from sparsellm.runs.files import warn, write_atomically
from sparsellm.runs.telemetry import records
from sparsellm.runs.telemetry.evaluations import task_metrics
from sparsellm.runs.telemetry.metrics import LAYER_METRICS, METRICS, mean

WANDB_ID_FILE = "wandb_id"
SENT_FILE = "wandb_sent.json"  # the last step of each kind of record that wandb has
START_SECONDS = 30  # in which wandb must answer
CLOSE_SECONDS = 60.0  # for which the end of a run waits for unsent records


def read_sent(file: Path) -> dict[str, int]:
    """The last step of each kind of record that wandb has; empty if nothing was sent.

    Raises:
        ValueError: the file is damaged.
    """
    if not file.is_file():
        return {}
    remedy = "delete it, and wandb gets all records again"
    return read_model(file, RootModel[dict[str, int]], remedy)


class Dashboard:
    """Sends records from a thread of its own.

    If wandb cannot be reached, its run goes on offline, and `wandb sync` sends it later. Once wandb
    has started, its own process waits for the network.

    Args:
        recipe: of the run, whose folder gets wandb's files.
        written: the records already in metrics.jsonl; those that wandb lacks are sent now. Steps
            that are computed again, with the same numbers, are not sent again; a change of branch
            (history.py) begins another wandb run.
    """

    def __init__(self, recipe: Recipe, written: Iterable[records.Record]) -> None:
        self._recipe = recipe
        self._sent_file = recipe.run_path / SENT_FILE
        self._sent = read_sent(self._sent_file)
        self._queue: queue.SimpleQueue[records.Record | None] = queue.SimpleQueue()
        for record in written:
            self._queue.put(record)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, record: records.Record) -> None:
        """Queues a record; returns at once."""
        self._queue.put(record)

    def close(self) -> None:
        """Waits until everything is sent, but not long: a dashboard must not keep a job alive."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            rest = f"`wandb sync {self._recipe.run_path}/wandb/*`"
            warn(f"wandb has not received all records yet; send the rest by {rest}")

    def _work(self) -> None:
        record = self._queue.get()
        for mode in (self._recipe.logging.wandb, "offline"):
            try:
                run = start_wandb(self._recipe, mode)
                while record is not None:
                    if record.step > self._sent.get(record.kind, -1):
                        run.log(wandb_values(record, self._recipe))
                        self._sent[record.kind] = record.step
                        write_atomically(self._sent_file, json.dumps(self._sent) + "\n")
                    record = self._queue.get()
                run.finish()
                return
            except Exception as error:  # wandb raises its own errors and those of its sockets
                if wandb := sys.modules.get("wandb"):
                    with contextlib.suppress(Exception):
                        wandb.teardown()  # wandb's process would refuse to start the same run again
                reason = shorten(f"{type(error).__name__}: {error}", 300)
                warn(
                    f"wandb is out of reach ({reason}); training goes on, and `wandb sync "
                    f"{self._recipe.run_path}/wandb/offline-run-*` sends its records later"
                )


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
    """The wandb run of a training run, the same one every time. ``mode`` replaces the recipe's.

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


def wandb_values(record: records.Record, recipe: Recipe) -> dict[str, Any]:
    """The values of a record that are logged to wandb."""
    base = {"tokens": record.tokens, "step": record.step}
    if isinstance(record, records.ValidationRecord):
        by_corpus = {f"validation/loss_{name}": loss for name, loss in record.by_corpus.items()}
        targets = {"validation/targets": record.num_targets}
        loss = {} if math.isnan(record.loss) else {"validation/loss": record.loss}
        return base | loss | targets | by_corpus
    if isinstance(record, records.EvaluationRecord):
        scores = {
            f"evaluation/{name}/{metric}": value
            for name, score in record.tasks.items()
            for metric, value in task_metrics(score).items()
        }
        mean = {} if record.mean is None else {"evaluation/mean": record.mean}
        return base | mean | scores
    if isinstance(record, records.FailureRecord):
        return base | {f"{record.what}/failed": 1}
    return base | _wandb_step(record, recipe)


def _wandb_step(record: records.TrainRecord, recipe: Recipe) -> dict[str, Any]:
    line, stats = record.line(), record.sparsity
    found: dict[str, Any] = {}
    for metric in METRICS:
        value = metric.value(line, recipe)
        if value is not None:
            found[f"{metric.wandb}/{metric.name}"] = value
    for by_layer in LAYER_METRICS:
        for layer, value in enumerate(by_layer.values(line)):
            found[f"layers/{by_layer.name}/{layer:02d}"] = value
    if stats.nnz_histogram:
        import wandb

        width = recipe.model.intermediate_size
        histogram: Any = (stats.nnz_histogram, [*records.nnz_bucket_edges(width), width + 1])
        found["sparsity/nnz_per_token"] = wandb.Histogram(np_histogram=histogram)
    starts = records.position_bucket_starts(recipe.model.context_length)
    for start, of_layers in zip(starts, zip(*stats.nnz_by_position, strict=True), strict=False):
        found[f"positions/nnz/{start:05d}"] = mean(list(of_layers))
    return found
