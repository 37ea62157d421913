"""Which checkpoints belong to the present branch of a run, and which are pruned."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparsellm.runs.checkpoint import step_name, steps_in
from sparsellm.runs.manifest import Manifest, read_manifest

_LONGEST = 1000  # ids that a manifest keeps


@dataclass(frozen=True)
class Lineage:
    """The ids of a run's checkpoints so far, the last one first."""

    ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest | None) -> Lineage:
        """The lineage up to and including a checkpoint; those of earlier versions have no id."""
        return (
            cls() if manifest is None else cls(tuple(manifest.ancestors)).continued_by(manifest.id)
        )

    def continued_by(self, identity: str) -> Lineage:
        """The lineage with one more checkpoint."""
        return Lineage((identity, *self.ids)[:_LONGEST])


def prune(folder: Path, newest: Manifest, keep: int, skipped: int = 0) -> None:
    """Deletes all but the ``keep`` newest checkpoints of the branch that ends in ``newest``.

    The checkpoints of ``skipped`` steps in a row hold the same weights: of them the newest alone is
    kept, beside those of before. Links, copies by other names and what belongs to another branch
    are left alone.

    Raises:
        OSError: something cannot be deleted; what can be is.
    """
    own = [
        (step, path)
        for step, path in steps_in(folder)
        if path.name == step_name(step) and _belongs(step, path, newest)
    ]
    before = [path for step, path in own if step <= newest.step - skipped]
    since = [path for step, path in own if step > newest.step - skipped]
    failures = [attempt(remove, doomed) for doomed in folder.glob(".tmp-pruned-*")]
    failures += [attempt(remove, doomed) for doomed in folder.glob(".tmp-replaced-*")]
    for old in before[:-keep] + since[:-1]:
        # Renamed first: a kill while deleting leaves no half a checkpoint of that name.
        doomed = folder / f".tmp-pruned-{old.name}"
        failures.append(attempt(old.rename, doomed) or attempt(remove, doomed))
    for failure in failures:
        if failure is not None:
            raise failure


def _belongs(step: int, path: Path, newest: Manifest) -> bool:
    manifest = read_manifest(path, "")
    # Without a manifest it is of an earlier version, when there was one branch.
    return step <= newest.step if manifest is None else manifest.id in newest.branch


def remove(path: Path) -> None:
    """Deletes a folder or file, if it is there; of a link, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def attempt(action: Callable[[Path], object], path: Path) -> OSError | None:
    """What went wrong, if anything."""
    try:
        action(path)
    except OSError as error:
        return error
    return None
