"""Whether a run can go on from a checkpoint, by the recipes of both.

Imports no torch, so that a refusal comes before it is loaded.
"""

from pathlib import Path

from sparsellm.recipe import Recipe, load_recipe
from sparsellm.recipe.estimate import model_shape
from sparsellm.recipe.strict import flatten
from sparsellm.runs.files import RECIPE_FILE

CHANGED = "changed since the checkpoint: "
# Keys that decide which function the weights compute.
_MODEL_KEYS = ("model.", "ffn.activation ", "ffn.gated ", "data.tokenizer ")
CHANGED_MODEL = tuple(f"{CHANGED}{key}" for key in _MODEL_KEYS)
CHANGED_DATA = f"{CHANGED}data."


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
    if not _same_shapes(saved, recipe):
        changes = cause_in(recipe_changes(saved, recipe), CHANGED_MODEL)
        raise ValueError(
            f"{path} holds a model of other shapes{changes}: use another name, --set "
            "name=NEW, or start over with --fresh"
        )


def _same_shapes(saved: Recipe, recipe: Recipe) -> bool:
    """As far as it is known without the tensors."""
    if model_shape(saved) != model_shape(recipe):
        return False
    try:
        return saved.padded_vocab_size == recipe.padded_vocab_size
    except (FileNotFoundError, ValueError):  # a tokenizer that is out of reach
        return True


def _check_gate_optimizer(path: Path, saved: Recipe, recipe: Recipe) -> None:
    """Refuses a resume that would give the gates' state to another optimizer."""
    before, now = ("adamw" if r.gates_by_adamw else "muon" for r in (saved, recipe))
    if before != now:
        raise ValueError(
            f"{path} has the state of gates that {before} updated, not {now}: resume with "
            f"--set optimizer.gate_optimizer={before}, or start a new run from its weights: "
            f"--set name=NEW --init-from {path}"
        )


def recipe_changes(saved: Recipe, recipe: Recipe) -> list[str]:
    """A sentence for each key whose value differs, beginning with `CHANGED`."""
    before, now = (flatten(r.model_dump(mode="json")) for r in (saved, recipe))
    return [
        f"{CHANGED}{key} {before.get(key)} → {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def cause_in(changes: list[str], begins: str | tuple[str, ...]) -> str:
    """The changes of some keys, from `recipe_changes`, for the end of an error message."""
    named = [change.removeprefix(CHANGED) for change in changes if change.startswith(begins)]
    return f" ({CHANGED}{', '.join(named)})" if named else ""
