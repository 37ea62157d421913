"""Where a run comes from: the checkpoint that it goes on from, and the records of a checkpoint.

The checkpoints and records of a run's folder follow one another: each continues the one before.
Whoever goes back to an older checkpoint begins a new run. Its session records and its checkpoints
then name that checkpoint as its `Parent`. Imports no torch.
"""

import re
from pathlib import Path
from typing import Any

from sparsellm.recipe.strict import read_json
from sparsellm.runs import checkpoint
from sparsellm.runs.files import SAMPLE_FILE, free_path
from sparsellm.runs.manifest import read_manifest
from sparsellm.runs.telemetry.dashboard import forget_run
from sparsellm.runs.telemetry.records import METRICS_FILE, Parent, read_lines, read_metrics, stays


def run_of(path: Path) -> Path | None:
    """The folder of a checkpoint's run; None for a folder elsewhere, such as an export."""
    folder = path.absolute().parent
    return folder.parent if folder.name == "checkpoints" else None


def records_of(path: Path, step: int) -> list[dict[str, Any]]:
    """What a checkpoint's run recorded up to its step; nothing if it is of no run with records.

    Raises:
        ValueError: a line is damaged.
    """
    run_path = run_of(path)
    if run_path is None or not (run_path / METRICS_FILE).is_file():
        return []
    return [line for line in read_metrics(run_path) if line["step"] <= step]


def set_records_aside(run_path: Path) -> Path | None:
    """Renames the records of a run that has no checkpoint and begins anew; None if it has none.

    They are all that is left of a run whose checkpoints were deleted.

    Raises:
        ValueError: a line is damaged.
    """
    records = run_path / METRICS_FILE
    if all(stays(record, -1) for _, record in read_lines(records)):
        return None
    forget_run(run_path)
    aside = free_path(records.with_suffix(""), records.suffix)
    records.rename(aside)
    return aside


def set_results_aside(run_path: Path, step: int) -> Path | None:
    """Moves what was measured of checkpoints after ``step``: the run makes others of these names.

    Those checkpoints were deleted or moved away. Returns the folder with their scores, analyses and
    sample of text; None if there are none.

    Raises:
        ValueError: the sample is damaged.
    """
    results = [
        path
        for path in (run_path / "checkpoints").glob("*_step_[0-9]*")
        if int(re.findall(r"_step_(\d+)", path.name)[0]) > step
    ]
    sample = run_path / SAMPLE_FILE
    if sample.is_file() and read_json(sample, "delete it").get("step", 0) > step:
        results.append(sample)
    if not results:
        return None
    aside = free_path(run_path / "results")
    aside.mkdir()
    for path in results:
        path.rename(aside / path.name)
    return aside


def start_of(run_path: Path, resume: Path | None) -> Path | None:
    """The checkpoint that training goes on from; None: training begins at step 0.

    It is the run's newest one. A run that has none yet begins from ``resume``, which is a
    checkpoint, or a run whose newest checkpoint is meant.

    Raises:
        FileNotFoundError, ValueError: ``resume`` is not a checkpoint, or the run has checkpoints
            that do not come from it.
    """
    newest = checkpoint.latest(run_path / "checkpoints")
    if resume is None:
        return newest
    start = _checkpoint_at(resume)
    if newest is None or start.resolve() == newest.resolve():
        return start
    if start.resolve().parent != newest.resolve().parent:
        manifest = read_manifest(start)
        parent = parent_of(newest)
        if manifest.id == read_manifest(newest).id or (parent and manifest.id == parent.id):
            return newest
    raise ValueError(
        f"{run_path} has trained to {newest.name} and does not go back to {start}: to start a new "
        f"run from it, add --set name=NEW. Without --resume, the run continues from {newest.name}"
    )


def parent_of(path: Path) -> Parent | None:
    """The checkpoint of another run that the run of a checkpoint began from, if it did.

    Raises:
        FileNotFoundError, ValueError: a file of the checkpoint is missing or damaged.
    """
    parent = checkpoint.read_trainer(path).get("parent")
    return None if parent is None else Parent(**parent)


def _checkpoint_at(path: Path) -> Path:
    if existing := checkpoint.checkpoint_at(path):
        return existing
    if (path / "config.json").is_file():
        raise ValueError(
            f"--resume {path}: it has only weights; start a new run from it: "
            f"--set name=NEW --init-from {path}"
        )
    raise FileNotFoundError(
        f"--resume {path} is not a checkpoint or a run that has one; give one such as runs/debug"
    )
