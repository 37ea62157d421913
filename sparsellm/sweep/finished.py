"""Which runs of a sweep are finished, by the records in their folders; needs no PyTorch."""

from typing import Any

from sparsellm.recipe import Recipe, load_recipe
from sparsellm.runs.files import RECIPE_FILE
from sparsellm.runs.records import METRICS_FILE, read_metrics
from sparsellm.strict import flatten


def is_finished(recipe: Recipe) -> bool:
    """Whether a run's records reach its last step, including the final measurements.

    Raises:
        ValueError: the folder's run has another recipe.
    """
    path = recipe.run_path
    if not (path / METRICS_FILE).is_file() or not (path / RECIPE_FILE).is_file():
        return False
    saved, present = (_comparable(r) for r in (load_recipe(str(path / RECIPE_FILE)), recipe))
    if keys := [k for k in saved | present if saved.get(k, ...) != present.get(k, ...)]:
        raise ValueError(
            f"{path} is a run of another recipe (it differs in {', '.join(keys)}): move it away, "
            "or give the sweep another name"
        )
    kinds = {"train"}
    kinds |= {"validation"} if recipe.validation.every_steps else set()
    kinds |= {"evaluation"} if recipe.evaluation.every_steps else set()
    return kinds <= {r["kind"] for r in read_metrics(path) if r["step"] == recipe.train.steps}


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """The settings that must not change when a run is resumed."""
    return flatten(recipe.model_dump(mode="json", exclude={"description", "logging", "checkpoint"}))
