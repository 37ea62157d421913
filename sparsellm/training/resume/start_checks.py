"""What would end a training run, as far as it is known before torch is loaded."""

from pathlib import Path

from sparsellm.arguments import check_out, check_sparse
from sparsellm.data.first_look import check_text
from sparsellm.evaluate.in_training import check_evaluation
from sparsellm.recipe import Recipe
from sparsellm.runs.checkpoint import check_texts, read_trainer
from sparsellm.runs.history import start_of
from sparsellm.runs.huggingface.find import find_checkpoint, weights_id
from sparsellm.runs.lock import refuse_if_trained
from sparsellm.runs.telemetry.dashboard import check_wandb
from sparsellm.training.resume.resumable import check_resumable


def check_run(
    recipe: Recipe, resume: Path | None, init_from: Path | None, *, fresh: bool
) -> tuple[Path | None, list[str]]:
    """Checks all that a run needs besides torch; changes nothing.

    Returns:
        The checkpoint that training goes on from, see `start_of` (None: it begins at step 0); and
        lines about unused weights and the text.

    Raises:
        FileNotFoundError, ValueError: the message says what is missing or wrong, and the remedy.
    """
    run_path = recipe.run_path.resolve()
    if fresh and init_from is not None and init_from.resolve().is_relative_to(run_path):
        raise ValueError(f"--fresh would move --init-from {init_from}; add --set name=NEW")
    check_out(run_path, is_folder=True, option="--set logging.run_dir=DIR")
    if recipe.ffn.kernels == "sparse":
        check_sparse("ffn.kernels: sparse", "set ffn.kernels=auto")
    refuse_if_trained(recipe.run_path)
    start = None if fresh else start_of(recipe.run_path, resume)
    notes = []
    if start is not None:
        check_texts(start)
        check_resumable(start, recipe)
        if init_from is not None and not recipe.train.distillation:
            notes = _unused_weights(start, init_from)
    check_wandb(recipe)
    check_evaluation(recipe)
    validates = recipe.validation.every_steps > 0
    return start, notes + check_text(recipe.data, recipe.model.context_length, validates)


def _unused_weights(start: Path, init_from: Path) -> list[str]:
    """A warning where a run that resumes from ``start`` began with other weights than these."""
    origin = read_trainer(start).get("init_from")
    try:
        unused_id = weights_id(find_checkpoint(init_from))
    except (FileNotFoundError, ValueError):
        unused_id = None  # a run needs what it began with no more
    if origin and unused_id in {None, origin.get("id")}:
        return []
    first = f"those of {origin['name']} (step {origin['step']:,})" if origin else "random ones"
    return [
        f"warning: --init-from {init_from} is not used: this run resumes, and its first weights "
        f"were {first}. To begin with the given ones, use another name (--set name=NEW), or "
        "start over with --fresh"
    ]
