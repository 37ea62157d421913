"""The records of a run, one object per line of ``<run>/metrics.jsonl``.

``kind`` is ``train``, ``validation``, ``evaluation``, ``failure``, ``session`` or ``session_end``,
``step`` counts finished optimizer steps, ``tokens`` the training tokens seen.

Records of version 0.1.0 and later stay readable: a field that is added later has a default, for
the lines that were written before. Kinds and fields that this version does not know are passed
over.
"""

import math
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, NonNegativeInt, RootModel

from sparsellm.recipe.sections import SparsityConfig
from sparsellm.recipe.strict import parse_json, read_text, validate
from sparsellm.runs.files import SWEEP_FILE

METRICS_FILE = "metrics.jsonl"
# Fields that a line lacks if they are empty.
_LEFT_OUT = (
    "corpus_tokens",
    "epochs",
    "layers",
    "by_corpus",
    "kernels",
    "parent",
    "init_from",
    "changes",
    "texts",
)


def l1_text(config: SparsityConfig, last: dict[str, Any] | None) -> str:
    """λ as text: the recipe's, or if a controller moves it, that of the last train record."""
    start = f"{config.l1_coefficient:g}"
    if config.target_nnz is None:
        return start
    movement = f"moved from {start} towards {config.target_nnz:g} non-zeros per token"
    if last is None or last.get("l1_coefficient") is None:
        return movement
    return f"{last['l1_coefficient']:.3g} at step {last['step']:,}, {movement}"


def position_bucket_starts(context_length: int) -> list[int]:
    """First positions of the buckets 0, 1, 2–3, 4–7, …: a sequence begins with many non-zeros."""
    return [0] + [2**k for k in range((context_length - 1).bit_length())]


def nnz_bucket_edges(intermediate_size: int) -> list[int]:
    """Left edges of the histogram of non-zeros per token: exact to 8, then four per octave."""
    edges = list(range(min(8, intermediate_size) + 1))
    while edges[-1] < intermediate_size:
        edges.append(min(max(edges[-1] + 1, round(edges[-1] * 2**0.25)), intermediate_size))
    return edges


@dataclass(frozen=True)
class StepStats:
    """One step's statistics over all ranks; lists run over layers."""

    nnz_mean: list[float] = field(default_factory=list)
    nnz_max: list[int] = field(default_factory=list)
    nnz_p50: list[int] = field(default_factory=list)
    nnz_p99: list[int] = field(default_factory=list)
    dead_fraction: list[float] = field(default_factory=list)
    # L × P, mean non-zeros per token
    nnz_by_position: list[list[float]] = field(default_factory=list)
    # tokens in each of `nnz_bucket_edges`, summed over layers
    nnz_histogram: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class KernelStats:
    """How a step was computed; lists run over layers."""

    sparse: list[bool] = field(default_factory=list)  # by the sparse kernels
    # neurons active for any of 64 tokens, neighbours in the order in which a rank computes them
    union_mean: list[float] = field(default_factory=list)
    overflows: int = 0  # patterns recomputed in backward, out of layers × micro-batches × ranks


@dataclass(frozen=True)
class Parent:
    """The checkpoint of another run, or the folder of weights, that a run began from."""

    name: str  # of that run
    step: NonNegativeInt
    tokens: NonNegativeInt
    path: str = ""  # where it was
    id: str = ""  # see `find.weights_id`


@dataclass(frozen=True)
class _Written:
    """What every record has."""

    step: NonNegativeInt
    tokens: NonNegativeInt = 0

    kind: ClassVar[str]

    def line(self) -> dict[str, Any]:
        """Its object in metrics.jsonl, with a step's values beside the other fields."""
        line: dict[str, Any] = {"kind": self.kind}
        for name, value in vars(self).items():
            if name == "values":
                line |= value
            elif value or name not in _LEFT_OUT:
                line[name] = vars(value) if is_dataclass(value) else value
        return line


@dataclass(frozen=True)
class TrainRecord(_Written):
    """One step over all ranks."""

    kind: ClassVar[str] = "train"
    # by the names of `metrics.METRICS`; None where unknown
    values: dict[str, float | None] = field(default_factory=dict)
    l1_by_layer: list[float] = field(default_factory=list)  # λ
    sparsity: StepStats = field(default_factory=StepStats)
    kernels: KernelStats | None = None
    corpus_tokens: dict[str, int] = field(default_factory=dict)  # of a mixture: trained so far
    # By corpus, if its text repeats: how often the step's text had been read before, its mean.
    epochs: dict[str, float] = field(default_factory=dict)
    # By the names of `metrics.LAYER_METRICS`: what a counter of theirs counted.
    layers: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ValidationRecord(_Written):
    """Validation loss: cross-entropy of held-out text."""

    kind: ClassVar[str] = "validation"
    loss: float = math.nan  # nats per token
    num_targets: int = 0  # number of held-out tokens in the mean
    by_corpus: dict[str, float] = field(default_factory=dict)  # of a mixture: each one's loss


@dataclass(frozen=True)
class EvaluationRecord(_Written):
    """Benchmark scores of the model after a step."""

    kind: ClassVar[str] = "evaluation"
    mean: float | None = None  # over the tasks that enter it (eval/suite.yaml)
    mean_stderr: float | None = None
    # by name: acc, acc_norm, their standard errors, rows, …
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class FailureRecord(_Written):
    """What failed while training continued: a step, a validation, …; or a target out of reach."""

    kind: ClassVar[str] = "failure"
    what: str = ""  # "step", "validation", "evaluation" or "target"
    error: str = ""


@dataclass(frozen=True)
class SessionRecord(_Written):
    """One process of the main rank, from its start to its end; in a sweep, its part with this run.

    Its step is that from which it starts or resumes.
    """

    kind: ClassVar[str] = "session"
    id: str = ""
    started: str = ""  # ISO 8601, UTC
    started_at: float | None = None  # the same, seconds since 1970
    startup_seconds: float = 0.0  # from its start to this record
    ranks: int = 1
    device: str = ""  # of the main rank, such as "NVIDIA H200" or "cpu"
    cores: int = 0  # that its process may use
    host: str = ""
    pid: int = 0
    commit: str = ""  # of the code; "" where it was installed without its repository
    versions: dict[str, str] = field(default_factory=dict)  # of sparsellm, Python, torch, CUDA, …
    parent: Parent | None = None  # None: the run began at step 0
    init_from: Parent | None = None  # of the weights of step 0; None: they were random
    # Keys of the recipe whose value is not that of the checkpoint it goes on from: "key old → new".
    changes: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # of each corpus, see `Corpus.text_id`


@dataclass(frozen=True)
class SessionEndRecord(_Written):
    """The end of a session: written by itself, or by the next one if it was killed.

    Its step is that of its last record.
    """

    kind: ClassVar[str] = "session_end"
    session: str = ""  # its id
    seconds: float = 0.0  # from the start of its process; of a killed one, to its last record
    how: str = ""  # "finished", "stopped (SIGTERM)", "failed: …", "killed"


Record = TrainRecord | ValidationRecord | EvaluationRecord | FailureRecord
Session = SessionRecord | SessionEndRecord


def read_metrics(run_path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """All records of a run, or those of a kind, as lines of the present version.

    Raises:
        FileNotFoundError: the folder has no metrics.
        ValueError: a line is damaged.
    """
    path = run_path / METRICS_FILE
    if not path.is_file():
        remedy = "a folder such as runs/debug"
        if (run_path / SWEEP_FILE).is_file():
            whole = f"sparsellm report --sweep {run_path}"
            remedy = f"one of its runs, or report the whole sweep: {whole}"
        raise FileNotFoundError(f"{run_path} is not a run: it has no {METRICS_FILE}; give {remedy}")
    lines = [record.line() for _, record in read_lines(path) if record is not None]
    return lines if kind is None else of_kind(lines, kind)


def of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The lines of a kind, in order."""
    return [line for line in lines if line["kind"] == kind]


def read_lines(path: Path) -> list[tuple[str, Record | Session | None]]:
    """Each line and its record; None for a kind that this version does not know.

    There are none if the file is missing.

    Raises:
        ValueError: a line is not a record; the message names file, line and key.
    """
    text = read_text(path, _REMEDY) if path.is_file() else ""
    return [
        (line, _record(line, f"{path}, line {number}"))
        for number, line in enumerate(text.splitlines(True), 1)
        if line[-1] == "\n"  # a kill can truncate the last one
    ]


def stays(record: Record | Session | None, step: int) -> bool:
    """Whether a record remains true where the steps after ``step`` are computed again.

    Records of sessions do, and so do those of a kind that this version does not know.
    """
    return record is None or isinstance(record, Session) or record.step <= step


_REMEDY = "restore the file from a copy, or correct that line"


class _Line(BaseModel):
    kind: str
    loss: float | None = None


_LINES: dict[str, Any] = {
    record.kind: RootModel[record]  # type: ignore[valid-type]
    for record in get_args(Record | Session)
}


def _record(text: str, source: str) -> Record | Session | None:
    line = parse_json(text, source, _REMEDY)
    kind = validate(_Line, line, source, remedy=_REMEDY).kind
    if kind not in _LINES:
        return None
    record: Record | Session = validate(_LINES[kind], line, source, remedy=_REMEDY).root
    if not isinstance(record, TrainRecord):
        return record
    values: dict[str, float | None] = {"loss": None}
    for key, value in line.items():  # all that are not fields
        if key not in vars(record) and (value is None or isinstance(value, int | float)):
            values[key] = value
    return replace(record, values=values)
