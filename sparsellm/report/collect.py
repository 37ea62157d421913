"""Reads runs for the report: recipe, records, activity of the neurons, evaluations.

Only a run with a checkpoint needs torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, field_validator

from sparsellm.analyze.cli import ANALYSIS_FOLDER, STATISTICS_FILE
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.recipe.strict import read_model
from sparsellm.runs import checkpoint
from sparsellm.runs.files import SAMPLE_FILE
from sparsellm.runs.telemetry.evaluations import Evaluation, read_evaluations
from sparsellm.runs.telemetry.records import (
    METRICS_FILE,
    nnz_bucket_edges,
    of_kind,
    position_bucket_starts,
    read_metrics,
)
from sparsellm.words import counted

if TYPE_CHECKING:
    from torch import Tensor

    from sparsellm.ffn.dispatch import Costs

_UNREADABLE, _MOST_UNREADABLE = "\N{REPLACEMENT CHARACTER}", 0.05  # and its largest share of a text
Records = list[dict[str, Any]]


class Sample(BaseModel):
    """What a run's model wrote by itself when training ended."""

    step: NonNegativeInt
    text: str

    @field_validator("text")
    @classmethod
    def _shows_control_characters(cls, text: str) -> str:
        shown = (char if char.isprintable() or char in "\n\t" else _UNREADABLE for char in text)
        return "".join(shown)

    def __str__(self) -> str:
        """The text, or that it is none: at first a model may write bytes of any value."""
        unreadable = self.text.count(_UNREADABLE)
        if unreadable <= _MOST_UNREADABLE * len(self.text):
            return self.text
        return (
            f"(no readable text yet: {unreadable} of its first "
            f"{counted(len(self.text), 'character')} are control characters or invalid UTF-8)"
        )


@dataclass(frozen=True)
class Activity:
    """How often each neuron was active over a window of training tokens."""

    active_LN: Tensor  # int64: tokens for which each neuron was active
    tokens: int  # length of the window in tokens
    step: int  # step of the checkpoint


@dataclass(frozen=True)
class RunData:
    """The data of one run that the report shows."""

    path: Path
    label: str  # the folder's name, with parent folders if two runs share it
    recipe: Recipe
    train: Records  # at least one
    validation: Records
    evaluations: list[Evaluation]  # by step
    activity: Activity | None  # None without a checkpoint, or before any neuron was counted
    costs: Costs | None  # ms of a layer's FFN per micro-batch; None if not measured
    analysis: dict[str, Any] | None  # statistics of the newest `sparsellm analyze`
    sessions: Records  # the run's processes in order of their start; empty if not recorded
    session_ends: dict[str, dict[str, Any]]  # by session id
    sample: Sample | None  # None if training has not ended, or ran in several processes

    @property
    def _finish(self) -> dict[str, Any] | None:
        """The end of its last process, if that finished."""
        last = self.session_ends.get(self.sessions[-1]["id"]) if self.sessions else None
        return last if last and last["how"] == "finished" else None

    @property
    def finished(self) -> bool:
        """Whether its last process ended so."""
        return self._finish is not None

    @property
    def end(self) -> dict[str, Any]:
        """What has its last step and tokens: the last record, or since a step that was skipped has
        none, the end of a process that finished."""
        return self._finish or self.train[-1]

    @property
    def is_whole(self) -> bool:
        """Whether it has been trained to its last step."""
        return self.finished or self.train[-1]["step"] >= self.recipe.train.steps

    @property
    def first_weights(self) -> dict[str, Any] | None:
        """The model whose weights it began with, a `Parent`; None if they were random."""
        return self.sessions[-1].get("init_from") if self.sessions else None

    @property
    def resumed_at(self) -> list[int]:
        """The first recorded step of each process after the first."""
        later = [session["step"] for session in self.sessions[1:]]
        firsts = [next((r["step"] for r in self.train if r["step"] > s), None) for s in later]
        return list(dict.fromkeys(step for step in firsts if step is not None))

    @property
    def seconds(self) -> float:
        """Wall time of all processes, each up to its end or its last record."""
        return sum(self._session_seconds(session) for session in self.sessions)

    def _session_seconds(self, session: dict[str, Any]) -> float:
        if session["id"] in self.session_ends:
            return self.session_ends[session["id"]]["seconds"]
        # The process is still training, or was killed and none came after it.
        last_record = self.train[-1] if self.train[-1]["step"] > session["step"] else None
        return session["startup_seconds"] + (last_record["seconds"] if last_record else 0.0)


def read_runs(run_paths: list[Path]) -> list[RunData]:
    """Reads each run once, in the order given.

    Raises:
        FileNotFoundError: a folder is not a run, or has lost its recipe.
        ValueError: a run has no record yet, or a file of it is damaged.
    """
    paths = list({path.resolve(): path for path in run_paths}.values())
    return [_read_run(path, label) for path, label in zip(paths, _labels(paths), strict=True)]


def without_records(run_path: Path) -> str | None:
    """Why a path, such as a match of ``runs/*``, has nothing to report; None if it has."""
    if not (run_path / METRICS_FILE).is_file():
        return f"it has no {METRICS_FILE}"
    if not read_metrics(run_path, "train"):
        return "nothing was logged yet"
    return None


def _labels(paths: list[Path]) -> list[str]:
    """Folder names; with parent folders if they clash, as after `train --fresh`."""
    whole = [path.resolve() for path in paths]
    labels = [path.name for path in whole]
    for depth in range(2, max(len(path.parts) for path in whole) + 1):
        count = Counter(labels)
        labels = [
            "/".join(path.parts[-depth:]) if count[label] > 1 else label
            for path, label in zip(whole, labels, strict=True)
        ]
    return labels


def _read_run(path: Path, label: str) -> RunData:
    records = read_metrics(path)
    train = of_kind(records, "train")
    if not train:
        raise ValueError(f"{path}: nothing was logged yet, so there is nothing to report")
    recipe_file = path / checkpoint.RECIPE_FILE
    if not recipe_file.is_file():
        raise FileNotFoundError(f"{recipe_file} is missing; copy it from one of the checkpoints")
    recipe = load_recipe(str(recipe_file))
    _check_shapes(path, recipe, train[-1])
    activity, costs = _of_newest_checkpoint(path)
    return RunData(
        path=path,
        label=label,
        recipe=recipe,
        train=train,
        validation=of_kind(records, "validation"),
        evaluations=read_evaluations(path, records),
        activity=activity,
        costs=costs,
        analysis=_analysis(path),
        sessions=of_kind(records, "session"),
        session_ends={r["session"]: r for r in of_kind(records, "session_end")},
        sample=_sample(path),
    )


def _check_shapes(path: Path, recipe: Recipe, record: dict[str, Any]) -> None:
    stats = record["sparsity"]
    expected = {
        "nnz_mean": recipe.model.num_hidden_layers,
        "nnz_histogram": len(nnz_bucket_edges(recipe.model.intermediate_size)),
    }
    lengths = {key: len(stats[key]) for key in expected}
    expected["nnz_by_position"] = len(position_bucket_starts(recipe.model.context_length))
    lengths["nnz_by_position"] = max(map(len, stats["nnz_by_position"]), default=0)
    for key, length in expected.items():
        if lengths[key] not in (length, 0):  # none where the record is older than the statistic
            raise ValueError(
                f"{path / METRICS_FILE}: {key} of step {record['step']} has {lengths[key]} values "
                f"and recipe.yaml's model has {length}; put the run's own recipe.yaml back"
            )


def _sample(path: Path) -> Sample | None:
    file = path / SAMPLE_FILE
    return Sample(**read_model(file, Sample, "delete it")) if file.is_file() else None


def _analysis(path: Path) -> dict[str, Any] | None:
    """The newest analysis of a checkpoint, else that in the run's own ``analysis/``."""
    analyses = sorted(path.glob(f"checkpoints/{ANALYSIS_FOLDER}_step_*"), reverse=True)
    for folder in (*analyses, path / ANALYSIS_FOLDER):
        file = folder / STATISTICS_FILE
        if file.is_file():
            return read_model(file, _Analysis, "restore it, or analyze again")
    return None


class _AnalysisLayer(BaseModel):
    nnz_mean: float
    nnz_p99: int
    union: dict[str, float]
    tile_max: int
    hot_share: dict[str, float]
    never_fired_fraction: float


class _AnalysisToken(BaseModel):
    text: str
    nnz_mean: float


class _Analysis(BaseModel):
    model_config = ConfigDict(extra="allow")

    tokens: NonNegativeInt
    corpus: str
    step: NonNegativeInt
    layers: list[_AnalysisLayer]
    tokens_by_nnz: dict[str, list[_AnalysisToken]]


def _of_newest_checkpoint(path: Path) -> tuple[Activity | None, Costs | None]:
    """The neurons' activity, and what `ffn.kernels: auto` measured when its process began.

    The activity is that of the last complete window, else of the open one.
    """
    newest = checkpoint.latest(path / "checkpoints")
    if newest is None:
        return None, None
    return checkpoint.read_newest(
        lambda: checkpoint.latest(path / "checkpoints") or newest, _activity_and_costs
    )


def _activity_and_costs(newest: Path) -> tuple[Activity | None, Costs | None]:
    from sparsellm.ffn.dispatch import Costs

    state = checkpoint.read_trainer(newest)
    measured = (state.get("kernels") or {}).get("costs")
    costs = Costs(**measured) if measured else None
    stats = checkpoint.read_stats(newest)
    for counts, tokens in (
        ("activity_LN", "activity_tokens"),
        ("window_fired_LN", "window_seen_tokens"),
    ):
        if tokens in stats and int(stats[tokens]):
            return Activity(stats[counts], int(stats[tokens]), int(state["step"])), costs
    return None, costs
