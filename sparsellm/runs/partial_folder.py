"""The folder of a checkpoint while it is written: creation, check, and its final place."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from sparsellm.runs.checkpoint import complete_step, replaced_name, step_name
from sparsellm.runs.lineage import attempt, remove
from sparsellm.runs.manifest import FileEntry


def prepare(folder: Path, partial: Path) -> None:
    """Creates the partial folder, and removes those of runs that were killed while they wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".tmp-step_*"):
        failure = attempt(remove, stale)
        if failure is not None:
            warn(f"what a killed run left stays: {failure}")
            if stale == partial:
                stale.rename(_unused(folder, f".tmp-stale-{partial.name}"))
    partial.mkdir()


def check_arrived(partial: Path, files: dict[str, FileEntry]) -> None:
    """Checks that the main rank sees the files of all ranks.

    Raises:
        FileNotFoundError: a file is missing or incomplete; the ranks do not share the folder.
    """
    for name, entry in files.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise FileNotFoundError(
                f"{path}, which some rank has written, is not seen by the main rank: the run's "
                "folder must be on a file system that all ranks share"
            )


def make_way(final: Path) -> None:
    """Replaces a checkpoint of the same step; a path that is not a checkpoint is renamed."""
    if not (final.exists() or final.is_symlink()):
        return
    step = None if final.is_symlink() else complete_step(final)
    if step is not None and final.name == step_name(step):
        remove(replaced_name(final))
        final.rename(replaced_name(final))
        return
    aside = _unused(final.parent, f"{final.name}.stray")
    final.rename(aside)
    warn(f"{final} was no complete checkpoint of this run; it is {aside} now")


def _unused(folder: Path, name: str) -> Path:
    places = (folder / f"{name}{i or ''}" for i in itertools.count())
    return next(place for place in places if not (place.exists() or place.is_symlink()))


def warn(text: str) -> None:
    """Prints a warning to standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
