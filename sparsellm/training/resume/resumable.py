"""Whether a run can go on from a checkpoint, by the recipes of both.

Imports no torch, so that a refusal comes before it is loaded.
"""

from pathlib import Path

from sparsellm.recipe import Recipe, load_recipe
from sparsellm.recipe.changes import check_shapes
from sparsellm.runs.files import RECIPE_FILE


def saved_recipe(path: Path) -> Recipe:
    """The recipe that lies in a checkpoint.

    Raises:
        FileNotFoundError, ValueError: it is missing or damaged.
    """
    return load_recipe(str(path / RECIPE_FILE))


def check_resumable(path: Path, recipe: Recipe) -> None:
    """Checks that a run of ``recipe`` can take the weights and optimizer state of a checkpoint.

    Raises:
        FileNotFoundError, ValueError: the checkpoint's recipe is missing or damaged, or the
            checkpoint is of another model or optimizer.
    """
    saved = saved_recipe(path)
    before, now = saved.optimizer.name, recipe.optimizer.name
    if before != now:
        raise ValueError(
            f"{path} has the state of optimizer.name {before}, not {now}: resume with "
            f"--set optimizer.name={before}, or start a new run from its weights: "
            f"--set name=NEW --init-from {path}"
        )
    if now == "muon":
        _check_gate_optimizer(path, saved, recipe)
    remedy = (
        f"to go on with its model, train {path / RECIPE_FILE} in place of the recipe (or repeat "
        "the command with its --init-from); for a new model, use another name, --set name=NEW, or "
        "start over with --fresh"
    )
    check_shapes(str(path), saved, recipe, remedy)


def _check_gate_optimizer(path: Path, saved: Recipe, recipe: Recipe) -> None:
    """Refuses a resume that would give the gates' state to another optimizer."""
    before, now = ("adamw" if r.gates_by_adamw else "muon" for r in (saved, recipe))
    if before != now:
        raise ValueError(
            f"{path} has the state of gates that {before} updated, not {now}: resume with "
            f"--set optimizer.gate_optimizer={before}, or start a new run from its weights: "
            f"--set name=NEW --init-from {path}"
        )
