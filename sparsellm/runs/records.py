"""The records of a run, one object per line of ``<run>/metrics.jsonl``.

``kind`` is ``train``, ``validation``, ``evaluation``, ``failure``, ``session`` or ``session_end``,
``step`` counts finished optimizer steps, ``tokens`` the training tokens seen.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from sparsellm.recipe_sections import SparsityConfig
from sparsellm.strict import parse_json, validate

METRICS_FILE = "metrics.jsonl"


def l1_text(config: SparsityConfig, last: dict[str, Any] | None) -> str:
    """λ for people: the recipe's, or where a controller moves it, that of the last train record."""
    start = f"{config.l1_coefficient:g}"
    if config.target_nnz is None:
        return start
    aim = f"moved from {start} towards {config.target_nnz:g} non-zeros per token"
    return f"{last['l1_coefficient']:.3g} at step {last['step']:,}, {aim}" if last else aim


def num_position_buckets(context_length: int) -> int:
    """Buckets 0, 1, 2–3, 4–7, …: the first tokens of a sequence fire far more neurons."""
    return int(math.log2(max(context_length - 1, 1))) + 2 if context_length > 1 else 1


def position_bucket_starts(context_length: int) -> list[int]:
    """First position of each bucket."""
    return [0] + [2**k for k in range(num_position_buckets(context_length) - 1)]


def nnz_bucket_edges(intermediate_size: int) -> list[int]:
    """Left edges of the histogram of non-zeros per token: exact to 8, then four an octave."""
    edges = list(range(min(8, intermediate_size) + 1))
    while edges[-1] < intermediate_size:
        edges.append(min(max(edges[-1] + 1, round(edges[-1] * 2**0.25)), intermediate_size))
    return edges


@dataclass(frozen=True)
class StepStats:
    """One step's statistics over all ranks; lists run over layers."""

    nnz_mean: list[float]
    nnz_max: list[int]
    nnz_p50: list[int]
    nnz_p99: list[int]
    dead_fraction: list[float]
    nnz_by_position: list[list[float]]  # L × P, mean non-zeros per token
    nnz_histogram: list[int]  # tokens in each of `nnz_bucket_edges`, summed over layers


@dataclass(frozen=True)
class KernelStats:
    """How a step was computed; lists run over layers."""

    sparse: list[bool]  # by the sparse kernels
    union_mean: list[float]  # neurons that fire for any of 64 neighbouring tokens
    overflows: int  # patterns recomputed in backward, out of layers × micro-batches × ranks


@dataclass(frozen=True)
class TrainRecord:
    """One step over all ranks."""

    step: int
    tokens: int
    values: dict[str, float | None]  # by the names of `metrics.METRICS`; None where unknown
    l1_by_layer: list[float]  # λ
    sparsity: StepStats
    kernels: KernelStats
    corpus_tokens: dict[str, int] = field(default_factory=dict)  # of a mixture, so far, by corpus

    kind: ClassVar[str] = "train"

    def line(self) -> dict[str, Any]:
        """What metrics.jsonl holds of it."""
        identity = {"kind": "train", "step": self.step, "tokens": self.tokens}
        stats = {"sparsity": asdict(self.sparsity), "kernels": asdict(self.kernels)}
        mixture = {"corpus_tokens": self.corpus_tokens} if self.corpus_tokens else {}
        return identity | self.values | {"l1_by_layer": self.l1_by_layer} | mixture | stats


@dataclass(frozen=True)
class ValidationRecord:
    """Held-out cross-entropy."""

    step: int
    tokens: int
    loss: float  # nats per token
    num_targets: int  # number of held-out tokens in the mean
    by_corpus: dict[str, float] = field(default_factory=dict)  # of a mixture: each one's loss

    kind: ClassVar[str] = "validation"

    def line(self) -> dict[str, Any]:
        """What metrics.jsonl holds of it."""
        line = {"kind": "validation", **asdict(self)}
        if not self.by_corpus:
            del line["by_corpus"]
        return line


@dataclass(frozen=True)
class EvaluationRecord:
    """Benchmark scores of the model after a step."""

    step: int
    tokens: int
    mean: float | None  # over the tasks that enter it (eval/suite.yaml)
    mean_stderr: float | None
    tasks: dict[str, dict[str, Any]]  # by name: acc, acc_norm, their standard errors, rows, …

    kind: ClassVar[str] = "evaluation"

    def line(self) -> dict[str, Any]:
        """What metrics.jsonl holds of it."""
        return {"kind": "evaluation", **asdict(self)}


@dataclass(frozen=True)
class FailureRecord:
    """A validation or evaluation that failed while training continued."""

    step: int
    tokens: int
    what: str  # "validation" or "evaluation"
    error: str

    kind: ClassVar[str] = "failure"

    def line(self) -> dict[str, Any]:
        """What metrics.jsonl holds of it."""
        return {"kind": "failure", **asdict(self)}


@dataclass(frozen=True)
class SessionRecord:
    """One process of the main rank, from its start to its end; in a sweep, its part for the run."""

    step: int  # from which it starts or resumes
    tokens: int
    id: str
    started: str  # ISO 8601, UTC
    started_at: float  # the same, seconds since 1970
    startup_seconds: float  # from its start to this record
    ranks: int
    device: str  # of the main rank, such as "NVIDIA H200" or "cpu"
    cores: int  # that its process may use
    host: str
    pid: int
    commit: str  # of the code; "" where it was installed without its repository
    versions: dict[str, str]  # of sparsellm, Python, torch, CUDA, …

    def line(self) -> dict[str, Any]:
        """What metrics.jsonl holds of it."""
        return {"kind": "session", **asdict(self)}


@dataclass(frozen=True)
class SessionEndRecord:
    """The end of a session: written by itself, or by the next one if it was killed."""

    step: int  # of its last record
    tokens: int
    session: str  # its id
    seconds: float  # wall time from the start of its process; of a killed one to its last record
    how: str  # "finished", "stopped (SIGTERM)", "failed: …", "killed"

    def line(self) -> dict[str, Any]:
        """What metrics.jsonl holds of it."""
        return {"kind": "session_end", **asdict(self)}


Record = TrainRecord | ValidationRecord | EvaluationRecord | FailureRecord


def record_of(line: dict[str, Any]) -> Record | None:
    """The record that a line of metrics.jsonl was written from; None for a session's."""
    content = dict(line)
    kind = content.pop("kind")
    if kind == "train":
        step, tokens = content.pop("step"), content.pop("tokens")
        sparsity = StepStats(**content.pop("sparsity"))
        kernels = KernelStats(**content.pop("kernels"))
        l1_by_layer = content.pop("l1_by_layer", [])
        corpus_tokens = content.pop("corpus_tokens", {})
        return TrainRecord(step, tokens, content, l1_by_layer, sparsity, kernels, corpus_tokens)
    classes = {
        "validation": ValidationRecord,
        "evaluation": EvaluationRecord,
        "failure": FailureRecord,
    }
    return classes[kind](**content) if kind in classes else None


def read_metrics(run_path: Path) -> list[dict[str, Any]]:
    """All records of a run.

    Raises:
        FileNotFoundError: the folder has no metrics.
        ValueError: a line is damaged.
    """
    path = run_path / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run_path} is not a run: it has no {METRICS_FILE}")
    return [record for _, record in whole_lines(path, whole=True)]


def whole_lines(path: Path, whole: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Each line and what it says; ``whole`` checks more than its kind and step.

    Raises:
        ValueError: a line is not a record; names file, line and key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error}); restore it") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line[-1] != "\n":
            continue  # a kill can truncate the last line
        source, remedy = f"{path}, line {number}", "delete that line"
        record = parse_json(line, source, remedy)
        try:
            model = _LINES.get(str(record.get("kind")), _Line) if whole else _Line
            validate(model, record, source)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{error}; {remedy}") from None
        found.append((line, record))
    return found


class _Line(BaseModel):
    """What every reader of metrics.jsonl relies on; lines of earlier versions have fewer keys."""

    model_config = ConfigDict(extra="allow")

    kind: str
    step: NonNegativeInt
    tokens: NonNegativeInt = 0


class _TrainLine(_Line):
    loss: float
    sparsity: StepStats
    kernels: KernelStats | None = None


class _ValidationLine(_Line):
    loss: float
    num_targets: PositiveInt


class _EvaluationLine(_Line):
    mean: float | None
    tasks: dict[str, dict[str, Any]]


class _FailureLine(_Line):
    what: str


class _SessionLine(_Line):
    id: str
    started_at: float
    startup_seconds: float
    ranks: PositiveInt
    device: str
    commit: str


class _SessionEndLine(_Line):
    session: str
    seconds: float
    how: str


_LINES: dict[str, type[_Line]] = {
    "train": _TrainLine,
    "validation": _ValidationLine,
    "evaluation": _EvaluationLine,
    "failure": _FailureLine,
    "session": _SessionLine,
    "session_end": _SessionEndLine,
}
