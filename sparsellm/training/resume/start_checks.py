"""What would end a training run, as far as it is known before torch is loaded."""

from pathlib import Path

from sparsellm.data.first_look import check_text
from sparsellm.evaluate.in_training import check_evaluation
from sparsellm.recipe import Recipe
from sparsellm.runs.history import start_of
from sparsellm.runs.lock import refuse_if_trained
from sparsellm.runs.telemetry.dashboard import check_wandb
from sparsellm.training.resume.resumable import check_resumable


def check_run(recipe: Recipe, resume: Path | None, *, fresh: bool) -> tuple[Path | None, list[str]]:
    """Checks all that a run needs besides torch; changes nothing.

    Returns:
        The checkpoint that training goes on from, see `start_of` (None: it begins at step 0); and
        lines about the text.

    Raises:
        FileNotFoundError, ValueError: the message says what is missing or wrong, and the remedy.
    """
    refuse_if_trained(recipe.run_path)
    start = None if fresh else start_of(recipe.run_path, resume)
    if start is not None:
        check_resumable(start, recipe)
    check_wandb(recipe)
    check_evaluation(recipe)
    validates = recipe.validation.every_steps > 0
    return start, check_text(recipe.data, recipe.model.context_length, validates)
