"""Abandoned branches of a run: their checkpoints and records are set aside, not deleted.

``<run>/abandoned/1/`` holds the checkpoints that the present branch does not continue, with the
records and the recipe as they were; it can be reported, exported, and resumed from.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from sparsellm.runs.checkpoint import LATEST, RECIPE_FILE, checkpoints_in
from sparsellm.runs.files import fsync, write_atomically
from sparsellm.runs.manifest import read_manifest
from sparsellm.runs.records import METRICS_FILE, whole_lines

ABANDONED = "abandoned"


def begin_branch(run_path: Path, resumed: Path | None) -> list[str]:
    """Sets aside checkpoints and records outside the branch that continues from a checkpoint.

    A checkpoint of ``abandoned/`` is restored with its records. A kill in between loses nothing:
    the rest is done at the next start.

    Args:
        run_path: the run's folder.
        resumed: the checkpoint; None where training begins at step 0.

    Returns:
        Sentences on what was done.
    """
    if resumed is None:
        return _set_records_aside(run_path)
    folder = run_path / "checkpoints"
    present = checkpoints_in(folder)
    others = _not_continued(present, resumed)
    notes = _set_aside(run_path, resumed, others) if others else []
    source = resumed.parent
    if _is_abandoned(run_path, source):
        _bring_back(run_path, source, resumed)
        notes.append(f"{source} is the present branch again, up to {resumed.name}")
    return notes


def _not_continued(present: list[Path], resumed: Path) -> list[Path]:
    """The checkpoints that are neither ``resumed`` nor before it."""
    manifest = read_manifest(resumed, "resume from an older checkpoint")
    branch = {manifest.id, *manifest.ancestors} if manifest else set()
    step = resumed.name[: len("step_") + 8]
    others = []
    for path in present:
        own = read_manifest(path, f"delete {path}")
        # Without a manifest it is of an earlier version, when there was one branch.
        continued = path.name <= step if own is None else own.id in branch
        if not continued:
            others.append(path)
    return others


def _set_aside(run_path: Path, resumed: Path, others: list[Path]) -> list[str]:
    aside = _new_folder(run_path)
    outside = not resumed.resolve().is_relative_to(run_path.resolve())
    _copy_records(run_path, aside)
    folder = run_path / "checkpoints"
    if resumed.parent == folder:
        write_atomically(folder / LATEST, resumed.name + "\n")
    for path in reversed(others):
        for scores in folder.glob(f"eval_{path.name}*.json"):
            scores.rename(aside / scores.name)
        path.rename(aside / path.name)
    fsync(aside)
    if outside:  # its records are those of another run
        (run_path / METRICS_FILE).unlink(missing_ok=True)
    newest = aside / others[-1].name
    names = ", ".join(path.name for path in others)
    return [
        f"training goes on from {resumed.name}: {names} and the records of that branch are set "
        f"aside in {aside}; --resume {newest} returns to them"
    ]


def _set_records_aside(run_path: Path) -> list[str]:
    records = run_path / METRICS_FILE
    if not records.is_file():
        return []
    lines = whole_lines(records)
    # Records of its processes remain valid and are no reason to set anything aside.
    sessions = [line for line, record in lines if record["kind"].startswith("session")]
    if len(sessions) == len(lines):
        return []
    aside = _new_folder(run_path)
    _copy_records(run_path, aside)
    write_atomically(records, "".join(sessions))
    return [
        f"{run_path} has records and no checkpoint: training begins at step 0, and the records are "
        f"set aside in {aside}"
    ]


def _copy_records(run_path: Path, aside: Path) -> None:
    for name in (METRICS_FILE, RECIPE_FILE):
        if (run_path / name).is_file():
            shutil.copy2(run_path / name, aside / name)
            fsync(aside / name)
    fsync(aside)


def _new_folder(run_path: Path) -> Path:
    folder = run_path / ABANDONED
    folder.mkdir(exist_ok=True)
    aside = next(p for i in itertools.count(1) if not (p := folder / str(i)).exists())
    aside.mkdir()
    return aside


def _is_abandoned(run_path: Path, source: Path) -> bool:
    return source.parent.resolve() == (run_path / ABANDONED).resolve()


def _bring_back(run_path: Path, source: Path, resumed: Path) -> None:
    folder = run_path / "checkpoints"
    later = _not_continued(checkpoints_in(source), resumed)
    for path in checkpoints_in(source):
        if path not in later and not (folder / path.name).exists():
            for scores in source.glob(f"eval_{path.name}*.json"):
                scores.rename(folder / scores.name)
            path.rename(folder / path.name)
    write_atomically(folder / LATEST, resumed.name + "\n")
    if (source / METRICS_FILE).is_file():
        records = (source / METRICS_FILE).read_text(encoding="utf-8")
        write_atomically(run_path / METRICS_FILE, records)
    if not checkpoints_in(source):
        shutil.rmtree(source)
