"""Abandoned branches of a run: their checkpoints and records are set aside, not deleted.

``<run>/abandoned/1/`` holds the checkpoints that the present branch does not continue, with the
records and the recipe as they were; it can be reported, exported, and resumed from.

A change of branch is written to ``branch.json`` before anything is moved. After a kill the next
start finishes it, so that records and weights are always of the same branch.
"""

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsellm.runs.checkpoint import LATEST, RECIPE_FILE, checkpoints_in, latest
from sparsellm.runs.dashboard import SENT_FILE, WANDB_ID_FILE
from sparsellm.runs.files import fsync, write_atomically
from sparsellm.runs.manifest import Manifest, read_manifest
from sparsellm.runs.records import METRICS_FILE, read_lines, read_metrics, stays
from sparsellm.strict import StrictModel, read_model

ABANDONED = "abandoned"
CHANGE_FILE = "branch.json"
_NONE = -1  # as `records_until`: the records of no step stay


def run_of(checkpoint: Path) -> Path | None:
    """The folder with the records of a checkpoint's run; None for an exported folder.

    A branch that was set aside has its checkpoints beside its records.
    """
    parent = checkpoint.absolute().parent
    if parent.name == "checkpoints":
        return parent.parent
    return parent if parent.parent.name == ABANDONED else None


def records_of(checkpoint: Path, step: int) -> list[dict[str, Any]]:
    """What a checkpoint's run recorded up to its step; nothing if it is of no run with records.

    Raises:
        ValueError: a line is damaged.
    """
    run_path = run_of(checkpoint)
    if run_path is None or not (run_path / METRICS_FILE).is_file():
        return []
    return [line for line in read_metrics(run_path) if line["step"] <= step]


class _Change(StrictModel):
    """A change of branch. Folders of ``abandoned/`` are named by their numbers."""

    leaving: tuple[str, ...] = ()  # checkpoints that are set aside
    aside: str = ""  # folder that they go to, with a copy of the records; "": nothing is set aside
    latest: str = ""  # checkpoint that ``latest`` names; "": as before
    records_from: str = ""  # folder whose records become the run's; "": its own stay
    records_until: int | None = None  # last step of its own records that stay; None: all


def begin_branch(run_path: Path, resumed: Path | None) -> list[str]:
    """Sets aside what the branch that goes on from ``resumed`` does not continue.

    If ``resumed`` is None, training begins at step 0. If it is a checkpoint in ``abandoned/``, the
    records there become the run's. Returns sentences on what was done.

    Raises:
        ValueError: the records are damaged; nothing was changed.
    """
    change = _to_start(run_path) if resumed is None else _to_branch(run_path, resumed)
    if change is None:
        return []
    write_atomically(run_path / CHANGE_FILE, change.model_dump_json(indent=1) + "\n")
    finish_change(run_path)
    return _notes(run_path, resumed, change)


def finish_change(run_path: Path) -> None:
    """Completes a change of branch if one was begun, such as one that a kill interrupted."""
    file = run_path / CHANGE_FILE
    if not file.is_file():
        return
    remedy = "move it away, and check that the records and `latest` are of one branch"
    change = _Change(**read_model(file, _Change, remedy))
    folder, metrics = run_path / "checkpoints", run_path / METRICS_FILE
    if change.aside:
        aside = run_path / ABANDONED / change.aside
        aside.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, RECIPE_FILE):
            if (run_path / name).is_file() and not (aside / name).exists():
                write_atomically(aside / name, (run_path / name).read_text(encoding="utf-8"))
        for name in change.leaving:
            if (folder / name).exists() and not (aside / name).exists():
                for scores in folder.glob(f"eval_{name}*"):  # and samples; they move before it
                    scores.rename(aside / scores.name)
                (folder / name).rename(aside / name)
                fsync(aside)
    if change.latest:
        write_atomically(folder / LATEST, change.latest + "\n")
    if change.records_from:
        source = run_path / ABANDONED / change.records_from / METRICS_FILE
        write_atomically(metrics, source.read_text(encoding="utf-8"))
    elif change.records_until is not None:
        kept = [line for line, record in read_lines(metrics) if stays(record, change.records_until)]
        write_atomically(metrics, "".join(kept))
    for name in (WANDB_ID_FILE, SENT_FILE):  # another branch is another wandb run
        (run_path / name).unlink(missing_ok=True)
    file.unlink()
    fsync(run_path)


def _to_start(run_path: Path) -> _Change | None:
    if all(stays(record, _NONE) for _, record in read_lines(run_path / METRICS_FILE)):
        return None
    return _Change(aside=_free_number(run_path), records_until=_NONE)


def _to_branch(run_path: Path, resumed: Path) -> _Change | None:
    folder, manifest = run_path / "checkpoints", read_manifest(resumed)
    present = _present(folder)
    inside = resumed.parent.resolve() == folder.resolve()
    leaving = [
        path for path in checkpoints_in(folder) if read_manifest(path).id not in manifest.branch
    ]
    written, taken = read_lines(run_path / METRICS_FILE), read_lines(resumed.parent / METRICS_FILE)
    source = ""
    until: int | None = _NONE
    if present is not None and manifest.id in present.branch:
        until = None
    elif taken and resumed.parent.parent.resolve() == (run_path / ABANDONED).resolve():
        source = resumed.parent.name
    elif present is not None and present.id in manifest.branch:
        # Later records may be of steps that it does not continue.
        until = None if inside else present.step
    if source:  # later records were computed from the checkpoint, or its branch has them too
        kept = {line for line, _ in taken}
        lost = any(
            line not in kept and not stays(r, _NONE)
            for line, r in written
            if stays(r, manifest.step)
        )
    else:
        lost = until is not None and not all(stays(record, until) for _, record in written)
    if not (leaving or lost or source):
        return None
    return _Change(
        leaving=tuple(path.name for path in leaving),
        aside=_free_number(run_path) if leaving or lost else "",
        latest=resumed.name if inside else "",
        records_from=source,
        records_until=until,
    )


def _present(folder: Path) -> Manifest | None:
    """The manifest of the newest checkpoint of the present branch that has a readable one."""
    newest = latest(folder)
    for path in ([newest] if newest else []) + checkpoints_in(folder)[::-1]:
        with suppress(FileNotFoundError, ValueError):
            return read_manifest(path)
    return None


def _free_number(run_path: Path) -> str:
    folder = run_path / ABANDONED
    return next(str(i) for i in itertools.count(1) if not (folder / str(i)).exists())


def _notes(run_path: Path, resumed: Path | None, change: _Change) -> list[str]:
    aside, notes = run_path / ABANDONED / change.aside, []
    if change.leaving:
        assert resumed is not None
        notes.append(
            f"training goes on from {resumed.name}: {', '.join(change.leaving)} and the records of "
            f"that branch are set aside in {aside}; --resume {aside / change.leaving[-1]} returns "
            "to them"
        )
    elif resumed is None:
        notes.append(
            f"{run_path} has records and no checkpoint: training begins at step 0, and the records "
            f"are set aside in {aside}"
        )
    elif change.aside:
        notes.append(
            f"the records of steps that {resumed} does not continue are set aside in {aside}"
        )
    if change.records_from:
        notes.append(
            f"the records of {run_path / ABANDONED / change.records_from} are the run's again"
        )
    return notes
