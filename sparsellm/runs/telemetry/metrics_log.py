"""Where a run's numbers go: a local JSONL, and the same numbers to wandb.

``<run>/metrics.jsonl`` holds one object per line, see `records`.
"""

import json
import os
import time

from sparsellm.recipe import Recipe
from sparsellm.runs.files import write_atomically
from sparsellm.runs.telemetry.dashboard import Dashboard, forget_run
from sparsellm.runs.telemetry.records import (
    METRICS_FILE,
    Record,
    Session,
    SessionEndRecord,
    SessionRecord,
    TrainRecord,
    read_lines,
    stays,
)
from sparsellm.waiting import warn

# Keys on which no number of a step depends.
_NO_NUMBERS = (
    "description ",
    "logging.",
    "checkpoint.",
    "evaluation.batch_size ",
    "evaluation.every_steps ",
    "evaluation.on_error ",
    "data.num_workers ",
)


class MetricsLog:
    """Writes the records of a run; only the main rank has one.

    Args:
        recipe: of the run, whose folder gets the files.
        resume_step: records after this step are dropped: they will be computed again.
        session: describes this process; it is the first record written.
    """

    def __init__(self, recipe: Recipe, resume_step: int, session: SessionRecord) -> None:
        self._path = path = recipe.run_path / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        written = read_lines(path)
        killed = _end_of_killed([record for _, record in written])
        remaining = [(line, record) for line, record in written if stays(record, resume_step)]
        sessions = [record for _, record in written if isinstance(record, SessionRecord)]
        dropped = len(remaining) < len(written)
        if dropped and _trained_otherwise(sessions, session) and forget_run(path.parent):
            # wandb keeps what it was sent: it would go on showing the old numbers of these steps.
            print(
                f"wandb: a new run gets all records, since steps after {resume_step} are trained "
                "again with another recipe; scores of `sparsellm eval` are in the old run only",
                flush=True,
            )
        text = "".join(line for line, _ in remaining)
        if not path.is_file() or text.encode() != path.read_bytes():
            write_atomically(path, text)
        self._file = path.open("ab", buffering=0)
        self._pending = b""  # lines that a full disk has refused
        self._session = session
        self._began = time.monotonic()
        if killed is not None:
            self._add(killed)
        self._add(session)
        self._last = (session.step, session.tokens)
        self._dashboard = None
        if recipe.logging.wandb != "disabled":
            records = [record for _, record in remaining if isinstance(record, Record)]
            self._dashboard = Dashboard(recipe, records)

    def write(self, record: Record) -> None:
        """Adds a record to the JSONL and to wandb."""
        self._add(record)
        self._last = (record.step, record.tokens)
        if self._dashboard is not None:
            self._dashboard.send(record)

    def sync(self) -> None:
        """Makes the records durable; called before each checkpoint, which must not outlive them.

        Raises:
            OSError: they cannot be written.
        """
        try:
            self._write_pending()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}; free space, and the same command resumes from the last "
                "checkpoint",
                str(self._path),
            ) from error

    def close(self, outcome: str) -> None:
        """Makes the records durable and ends the wandb run.

        Args:
            outcome: says in a few words how this process ended, such as ``finished``.

        Raises:
            OSError: they cannot be written.
        """
        seconds = self._session.startup_seconds + time.monotonic() - self._began
        step, tokens = self._last
        self._add(SessionEndRecord(step, tokens, self._session.id, seconds, outcome))
        try:
            self.sync()
        finally:
            if self._dashboard is not None:
                self._dashboard.close()
            self._file.close()

    def _add(self, record: Record | Session) -> None:
        """Adds a line; those that a full disk refuses are kept until it takes them."""
        is_first = not self._pending
        self._pending += (json.dumps(record.line()) + "\n").encode()
        try:
            self._write_pending()
        except OSError as error:
            if is_first:
                warn(
                    f"{self._path} cannot be written ({error.strerror}): its records wait in "
                    "memory, and training goes on to the next checkpoint; free space"
                )

    def _write_pending(self) -> None:
        while self._pending:
            written = self._file.write(self._pending)  # maybe a part, where the disk fills up
            self._pending = self._pending[written:]


def _trained_otherwise(sessions: list[SessionRecord], present: SessionRecord) -> bool:
    """Whether earlier sessions may have had other numbers in the steps that are trained again."""
    for session in reversed(sessions):
        if session.step == present.step:  # both began with the same checkpoint
            return _changes_of_numbers(session) != _changes_of_numbers(present)
        if session.step < present.step:  # the checkpoint is its own, with its recipe
            break
        if _changes_of_numbers(session):
            return True
    return bool(_changes_of_numbers(present))


def _changes_of_numbers(session: SessionRecord) -> list[str]:
    """The recipe's changes since the checkpoint that may change the records of a step."""
    return [change for change in session.changes if not change.startswith(_NO_NUMBERS)]


def _end_of_killed(records: list[Record | Session | None]) -> SessionEndRecord | None:
    """The end of the last session, if its process was killed before it could write it."""
    sessions = [record for record in records if isinstance(record, Session)]
    if not sessions or isinstance(sessions[-1], SessionEndRecord):
        return None
    session, last = sessions[-1], next(r for r in reversed(records) if r is not None)
    # By what it wrote: the file's time is that of its copy, if the folder was copied since.
    trained = [r for r in records if isinstance(r, TrainRecord) and r.step > session.step]
    seconds = session.startup_seconds + (trained[-1].values.get("seconds") or 0.0 if trained else 0)
    return SessionEndRecord(last.step, last.tokens, session.id, seconds, "killed")
