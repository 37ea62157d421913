"""Abandoned branches of a run: their checkpoints and records are set aside, not deleted.

``<run>/abandoned/1/`` holds the checkpoints that the present branch does not continue, with the
records and the recipe as they were; it can be reported, exported, and resumed from.

A change of branch is written to ``branch.json`` before anything is moved. After a kill the next
start finishes it, so that records and weights are always of the same branch.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from sparsellm.runs.checkpoint import (
    ABANDONED,
    LATEST,
    RECIPE_FILE,
    REMEDY,
    checkpoints_in,
    complete_step,
    latest,
    steps_in,
)
from sparsellm.runs.dashboard import SENT_FILE, WANDB_ID_FILE
from sparsellm.runs.files import fsync, read_model, write_atomically
from sparsellm.runs.manifest import Manifest, read_manifest
from sparsellm.runs.records import METRICS_FILE, read_lines, stays
from sparsellm.strict import StrictModel

CHANGE_FILE = "branch.json"
_NONE = -1  # no step's records


class _Change(StrictModel):
    """A change of branch. Folders of ``abandoned/`` are named by their numbers."""

    leaving: tuple[str, ...] = ()  # checkpoints that are set aside
    aside: str = ""  # folder that they go to, with a copy of the records; "": nothing is set aside
    source: str = ""  # folder whose branch is the present one again; "": none
    returning: tuple[str, ...] = ()  # its checkpoints that come back
    latest: str = ""  # checkpoint that ``latest`` names; "": as before
    records_until: int | None = None  # last step of the records that stay; None: all, or source's


def begin_branch(run_path: Path, resumed: Path | None) -> list[str]:
    """Sets aside checkpoints and records outside the branch that continues from a checkpoint.

    A checkpoint of ``abandoned/`` is restored with its records.

    Args:
        run_path: the run's folder.
        resumed: the checkpoint; None where training begins at step 0.

    Returns:
        Sentences on what was done.

    Raises:
        ValueError: the records are damaged; nothing was changed.
    """
    change = _from_start(run_path) if resumed is None else _to_branch(run_path, resumed)
    if change is None:
        return []
    write_atomically(run_path / CHANGE_FILE, change.model_dump_json(indent=1) + "\n")
    finish_change(run_path)
    return _notes(run_path, resumed, change)


def finish_change(run_path: Path) -> str:
    """Completes a change of branch, also one that a kill has interrupted.

    Returns:
        The folder of ``abandoned/`` whose branch is the present one again; "" where there is none.
    """
    file = run_path / CHANGE_FILE
    if not file.is_file():
        return ""
    remedy = "move it away, and check that the records and `latest` are of one branch"
    change = _Change(**read_model(file, _Change, remedy))
    folder, abandoned = run_path / "checkpoints", run_path / ABANDONED
    aside, source = abandoned / change.aside, abandoned / change.source
    if change.aside:
        aside.mkdir(parents=True, exist_ok=True)
        _copy_records(run_path, aside)
    if change.latest:
        write_atomically(folder / LATEST, change.latest + "\n")
    for name in change.leaving:
        _move(folder, aside, name)
    for name in change.returning:
        _move(source, folder, name)
    if change.records_until is not None:
        _cut_records(run_path, change.records_until)
    elif change.source and (source / METRICS_FILE).is_file():
        text = (source / METRICS_FILE).read_text(encoding="utf-8")
        write_atomically(run_path / METRICS_FILE, text)
    for name in (WANDB_ID_FILE, SENT_FILE):  # another branch is another wandb run
        (run_path / name).unlink(missing_ok=True)
    if change.source and source.is_dir() and not checkpoints_in(source):
        shutil.rmtree(source)
    file.unlink()
    fsync(run_path)
    return str(source) if change.source else ""


def _from_start(run_path: Path) -> _Change | None:
    if not _lost_lines(run_path, _NONE):
        return None
    return _Change(aside=_free_number(run_path), records_until=_NONE)


def _to_branch(run_path: Path, resumed: Path) -> _Change | None:
    folder = run_path / "checkpoints"
    leaving = _not_continued(folder, resumed)
    name = resumed.name.removeprefix(".tmp-replaced-")
    source, returning = "", []
    if resumed.parent.parent.resolve() == (run_path / ABANDONED).resolve():
        source = resumed.parent.name
        left = {*_not_continued(resumed.parent, resumed), *_names(folder)} - {*leaving}
        returning = [*dict.fromkeys(n for n in (*_names(resumed.parent), name) if n not in left)]
        has_records = (resumed.parent / METRICS_FILE).is_file()
        until = None if has_records else _NONE
        lost = _lost_lines(run_path, until, resumed.parent)
    else:
        until = _own_records(run_path, resumed)
        lost = _lost_lines(run_path, until)
    if not (leaving or source or lost):
        return None
    inside = source or resumed.parent.resolve() == folder.resolve()
    return _Change(
        leaving=tuple(leaving),
        aside=_free_number(run_path) if leaving or lost else "",
        source=source,
        returning=tuple(returning),
        latest=name if inside else "",
        records_until=until,
    )


def _names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_in(folder)]


def _not_continued(folder: Path, resumed: Path) -> list[str]:
    """The checkpoints in a folder that are neither ``resumed`` nor before it."""
    manifest, last = read_manifest(resumed, REMEDY), complete_step(resumed)
    assert last is not None
    others = []
    for step, path in steps_in(folder):
        own = read_manifest(path, REMEDY)
        # Without a manifest it is of an earlier version, when there was one branch.
        continued = step <= last if own is None else manifest and own.id in manifest.branch
        if not continued:
            others.append(path.name)
    return others


def _own_records(run_path: Path, resumed: Path) -> int | None:
    """The last step up to which the run's records are of a checkpoint's branch; None: all are."""
    folder = run_path / "checkpoints"
    manifest, present = read_manifest(resumed, REMEDY), _present(folder)
    if manifest is None or (present is None and checkpoints_in(folder)):
        # Of an earlier version: only its place tells which run it belongs to.
        return None if resumed.resolve().is_relative_to(run_path.resolve()) else _NONE
    if present is None:
        return _NONE
    if manifest.id in present.branch:
        return None
    if present.id in manifest.branch:  # later records may be of steps that it does not continue
        return None if resumed.parent.resolve() == folder.resolve() else present.step
    return _NONE


def _present(folder: Path) -> Manifest | None:
    """The manifest of the newest checkpoint of the present branch that has a readable one."""
    newest = latest(folder)
    for path in ([newest] if newest else []) + checkpoints_in(folder)[::-1]:
        try:
            manifest = read_manifest(path, REMEDY)
        except ValueError:
            continue
        if manifest is not None:
            return manifest
    return None


def _lost_lines(run_path: Path, until: int | None, source: Path | None = None) -> bool:
    """Whether some step's records would be lost."""
    if until is None and source is None:
        return False
    taken = read_lines(source / METRICS_FILE) if source is not None and until is None else []
    kept = {line for line, _ in taken}
    last = _NONE if until is None else until
    written = read_lines(run_path / METRICS_FILE)
    return any(line not in kept and not stays(record, last) for line, record in written)


def _cut_records(run_path: Path, until: int) -> None:
    file = run_path / METRICS_FILE
    if kept := "".join(line for line, record in read_lines(file) if stays(record, until)):
        write_atomically(file, kept)
    else:
        file.unlink(missing_ok=True)


def _move(origin: Path, target: Path, name: str) -> None:
    """Moves a checkpoint, and its scores before it: where it has moved, they have too."""
    if (origin / name).exists() and not (target / name).exists():
        for scores in origin.glob(f"eval_{name}*.json"):
            scores.rename(target / scores.name)
        (origin / name).rename(target / name)
        fsync(target)


def _copy_records(run_path: Path, aside: Path) -> None:
    for name in (METRICS_FILE, RECIPE_FILE):
        if (run_path / name).is_file() and not (aside / name).exists():
            write_atomically(aside / name, (run_path / name).read_text(encoding="utf-8"))


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
    if resumed is not None and change.source:
        notes.append(f"{resumed.parent} is the present branch again, up to {resumed.name}")
    return notes
