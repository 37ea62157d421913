"""wandb: receives each record of metrics.jsonl once, and never delays or stops training."""

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
from textwrap import shorten
from typing import Any

from pydantic import RootModel

from sparsellm.recipe import Recipe
from sparsellm.recipe.strict import read_model
from sparsellm.runs.files import write_atomically
from sparsellm.runs.telemetry import records
from sparsellm.runs.telemetry.evaluations import task_metrics
from sparsellm.runs.telemetry.metrics import LAYER_METRICS, METRICS, mean
from sparsellm.runs.telemetry.wandb_file import logged_steps
from sparsellm.waiting import warn

WANDB_ID_FILE = "wandb_id"
SENT_FILE = "wandb_sent.json"  # the last step of each kind of record that wandb has
SENT = "sent/"  # with a record's kind: a key under which each record has its step in wandb
START_SECONDS = 30  # in which wandb must answer
CLOSE_SECONDS = 60.0  # for which the end of a run waits for unsent records
WRITE_SECONDS = 10.0  # for which it waits until wandb has written them to the disk


def read_sent(file: Path) -> dict[str, int]:
    """The last step of each kind of record that wandb has; empty if nothing was sent.

    Raises:
        ValueError: the file is damaged.
    """
    if not file.is_file():
        return {}
    remedy = "delete it, and wandb gets all records again"
    return read_model(file, RootModel[dict[str, int]], remedy)


def sent_to_disk(run_path: Path, run_id: str) -> dict[str, int]:
    """The last step of each kind of record that no kill of wandb's processes loses.

    It is what lies in the files of offline runs. They may have been sent and deleted since, but
    ``wandb_sent.json`` remembers what they had.

    Raises:
        ValueError: that file is damaged.
    """
    files = sorted(run_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    return _latest(read_sent(run_path / SENT_FILE), *(logged_steps(file, SENT) for file in files))


def sent_to_server(run: Any) -> dict[str, int]:
    """The same of a wandb run that has just started: what its server has, if it is online."""
    summary = dict(run.summary)
    return {key.removeprefix(SENT): int(summary[key]) for key in summary if key.startswith(SENT)}


def _latest(*steps: dict[str, int]) -> dict[str, int]:
    kinds = sorted(kind for each in steps for kind in each)
    return {kind: max(each.get(kind, -1) for each in steps) for kind in kinds}


def forget_run(run_path: Path) -> bool:
    """Lets the next session begin another wandb run, which gets all records that are left.

    Returns whether there was one.
    """
    existed = (run_path / WANDB_ID_FILE).is_file()
    for name in (WANDB_ID_FILE, SENT_FILE):
        (run_path / name).unlink(missing_ok=True)
    return existed


class Dashboard:
    """Sends records from a thread of its own.

    If wandb cannot be reached, its run goes on offline, and `wandb sync` sends it later. Once wandb
    has started, its own process waits for the network. What wandb's `log` has taken is lost if all
    processes are killed; the next session sends it again.

    Args:
        recipe: of the run, whose folder gets wandb's files.
        written: the records already in metrics.jsonl; those that wandb lacks are sent now. Steps
            that are computed again, with the same numbers, are not sent again.
    """

    def __init__(self, recipe: Recipe, written: Iterable[records.Record]) -> None:
        self._recipe = recipe
        read_sent(recipe.run_path / SENT_FILE)  # raises here, and not in the thread
        self._sent: dict[str, int] = {}
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
                safe = _latest(sent_to_disk(self._recipe.run_path, run.id), sent_to_server(run))
                self._remember(safe)
                self._sent = _latest(self._sent, safe)
                while record is not None:
                    kind = record_kind(record)
                    if record.step > self._sent.get(kind, -1):
                        values = wandb_values(record, self._recipe)
                        run.log(values | {f"{SENT}{kind}": record.step})
                        self._sent[kind] = record.step
                    record = self._queue.get()
                run.finish()
                self._remember(self._sent if mode == "online" else self._written(run.id))
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

    def _written(self, run_id: str) -> dict[str, int]:
        """What lies on the disk; wandb's process may write on for a moment after its `finish`."""
        end, path = time.monotonic() + WRITE_SECONDS, self._recipe.run_path
        while (written := sent_to_disk(path, run_id)) != self._sent and time.monotonic() < end:
            time.sleep(0.1)
        return written

    def _remember(self, sent: dict[str, int]) -> None:
        write_atomically(self._recipe.run_path / SENT_FILE, json.dumps(sent) + "\n")


def record_kind(record: records.Record) -> str:
    """The kind of a record, by which steps sent are remembered; of a failure also what failed."""
    if isinstance(record, records.FailureRecord):
        return f"{record.kind}/{record.what}"
    return record.kind


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
            "logging.wandb is online, but wandb has no API key: run `wandb login`, set "
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
    run.define_metric(f"{SENT}*", step_metric="tokens", hidden=True)
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
    logged: dict[str, Any] = {}
    for metric in METRICS:
        value = metric.value(line, recipe)
        if value is not None:
            logged[f"{metric.wandb}/{metric.name}"] = value
    for by_layer in LAYER_METRICS:
        for layer, value in enumerate(by_layer.values(line)):
            logged[f"layers/{by_layer.name}/{layer:02d}"] = value
    if stats.nnz_histogram:
        import wandb

        width = recipe.model.intermediate_size
        histogram: Any = (stats.nnz_histogram, [*records.nnz_bucket_edges(width), width + 1])
        logged["sparsity/nnz_per_token"] = wandb.Histogram(np_histogram=histogram)
    starts = records.position_bucket_starts(recipe.model.context_length)
    for start, of_layers in zip(starts, zip(*stats.nnz_by_position, strict=True), strict=False):
        logged[f"positions/nnz/{start:05d}"] = mean(list(of_layers))
    return logged
