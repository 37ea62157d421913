"""Whether a run can go on from a checkpoint, by the recipes of both.

Imports no torch, so that a refusal comes before it is loaded.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sparsellm.recipe import Recipe, without_removed
from sparsellm.recipe.estimate import model_shape
from sparsellm.recipe.strict import flatten, load_yaml
from sparsellm.runs.files import RECIPE_FILE

CHANGED = "changed since the checkpoint: "
# Keys that decide which function the weights compute.
_MODEL_KEYS = ("model.", "ffn.activation ", "ffn.gated ", "data.tokenizer ")
CHANGED_MODEL = tuple(f"{CHANGED}{key}" for key in _MODEL_KEYS)
CHANGED_DATA = f"{CHANGED}data."


def saved_recipe(path: Path) -> dict[str, Any]:
    """The recipe that lies in a checkpoint, without keys that changed nothing."""
    return without_removed(load_yaml(path / RECIPE_FILE))


def check_resumable(path: Path, recipe: Recipe) -> None:
    """Checks that a run of ``recipe`` can take the weights and optimizer state of a checkpoint.

    Raises:
        FileNotFoundError, ValueError: the checkpoint's recipe is missing or damaged, or the
            checkpoint is of another model or optimizer.
    """
    saved = saved_recipe(path)
    before, now = saved.get("optimizer", {}).get("name", "adamw"), recipe.optimizer.name
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
            f"{path} is of a model of other shapes{changes}: train this one by another name, --set "
            "name=NEW, or start over with --fresh"
        )


def _same_shapes(saved: dict[str, Any], recipe: Recipe) -> bool:
    """As far as it is known without the tensors."""
    try:
        before = Recipe.model_validate(saved)
    except ValidationError:  # of a version with other keys
        return True
    if model_shape(before) != model_shape(recipe):
        return False
    try:
        return before.padded_vocab_size == recipe.padded_vocab_size
    except (FileNotFoundError, ValueError):  # a tokenizer that is out of reach
        return True


def _check_gate_optimizer(path: Path, saved: dict[str, Any], recipe: Recipe) -> None:
    """Refuses a resume that would give the gates' state to another optimizer.

    Before `optimizer.gate_optimizer` existed, Muon updated the gates of every model without L1.
    """
    optimizer = saved.get("optimizer", {})
    l1 = saved.get("sparsity", {}).get("l1_coefficient", 0)
    gated = saved.get("ffn", {}).get("gated", True)
    default = "adamw" if l1 or (gated and "gate_optimizer" in optimizer) else "muon"
    before = optimizer.get("gate_optimizer") or default
    now = "adamw" if recipe.gates_by_adamw else "muon"
    if before != now:
        raise ValueError(
            f"{path} has the state of gates that {before} updated, not {now}: resume with "
            f"--set optimizer.gate_optimizer={before}, or start a new run from its weights: "
            f"--set name=NEW --init-from {path}"
        )


def recipe_changes(saved: dict[str, Any], recipe: Recipe) -> list[str]:
    """A sentence for each key whose value differs, beginning with `CHANGED`."""
    before, now = flatten(saved), flatten(recipe.model_dump(mode="json"))
    return [
        f"{CHANGED}{key} {before.get(key)} → {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def cause_in(changes: list[str], begins: str | tuple[str, ...]) -> str:
    """The changes of some keys, from `recipe_changes`, for the end of an error message."""
    named = [change.removeprefix(CHANGED) for change in changes if change.startswith(begins)]
    return f" ({CHANGED}{', '.join(named)})" if named else ""
