"""The folder of a checkpoint while it is written, its final place, and pruning."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

from sparsellm.runs.checkpoint import LATEST, checkpoints_in, step_of
from sparsellm.runs.files import fsync, write_atomically
from sparsellm.runs.manifest import Manifest, read_manifest, write_manifest
from sparsellm.waiting import warn


def prepare(partial: Path) -> None:
    """Creates the partial folder, and removes those of runs that were killed while they wrote."""
    folder = partial.parent
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".tmp-step_*"):
        failure = attempt(remove, stale)
        if failure is not None:
            warn(f"the remains of a killed run could not be deleted: {failure}")
            if stale == partial:
                stale.rename(_unused(folder, f".tmp-stale-{partial.name}"))
    partial.mkdir()


def publish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Makes a checkpoint complete, durable and the latest; what had its name before is renamed.

    Raises:
        FileNotFoundError: a file is missing or incomplete; the ranks do not share the folder.
    """
    for name, entry in manifest.files.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise FileNotFoundError(
                f"{path}, which another rank wrote, is not visible to the main rank: the run's "
                "folder must be on a file system that all ranks share"
            )
    write_manifest(partial, manifest)
    fsync(partial)
    if final.exists() or final.is_symlink():
        aside = _unused(final.parent, f"{final.name}.stray")
        final.rename(aside)
        warn(f"{final} was there already; it is {aside} now")
    partial.rename(final)
    fsync(final.parent)
    write_atomically(final.parent / LATEST, final.name + "\n")


def _unused(folder: Path, name: str) -> Path:
    places = (folder / f"{name}{i or ''}" for i in itertools.count())
    return next(place for place in places if not (place.exists() or place.is_symlink()))


def prune(
    folder: Path, newest: Manifest, keep: int, skipped: int = 0, milestone: int | None = None
) -> None:
    """Deletes all but the ``keep`` newest checkpoints of the branch that ends in ``newest``.

    The checkpoint of the step ``milestone`` is kept beside them.

    The checkpoints of ``skipped`` steps in a row hold the same weights: only the newest of them is
    kept, beside the earlier ones. Links, copies by other names and what belongs to another branch
    are left alone.

    Raises:
        OSError: something cannot be deleted; everything else is.
    """
    branch = [p for p in checkpoints_in(folder) if read_manifest(p).id in newest.branch]
    branch = [path for path in branch if step_of(path) != milestone]
    before = [path for path in branch if step_of(path) <= newest.step - skipped]
    since = [path for path in branch if step_of(path) > newest.step - skipped]
    failures = [attempt(remove, path) for path in folder.glob(".tmp-pruned-*")]
    for old in before[:-keep] + since[:-1]:
        # It is renamed first: a kill during deletion leaves no half checkpoint of its name.
        doomed = folder / f".tmp-pruned-{old.name}"
        failures.append(attempt(old.rename, doomed) or attempt(remove, doomed))
    if failed := [failure for failure in failures if failure is not None]:
        raise failed[0]


def remove(path: Path) -> None:
    """Deletes a folder or file, if it is there; of a link, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def attempt(action: Callable[[Path], object], path: Path) -> OSError | None:
    """Calls ``action`` with a path; returns what went wrong, if anything."""
    try:
        action(path)
    except OSError as error:
        return error
    return None
