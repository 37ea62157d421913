"""`sparsellm import`: a Hugging Face folder as a checkpoint, weights only."""

from pathlib import Path

from sparsellm.arguments import check_out
from sparsellm.export.save_export import refuse_occupied
from sparsellm.runs import checkpoint, state
from sparsellm.runs.checkpoint import Snapshot
from sparsellm.runs.files import write_atomically
from sparsellm.runs.hf_folder import CONFIG_FILE, is_hugging_face, local_copy, stored_dtypes
from sparsellm.runs.pretrained import load_pretrained
from sparsellm.runs.saver import save


def import_export(
    source: Path, run_path: Path, recipe: str | None = None
) -> tuple[Path, list[str]]:
    """Writes ``run_path/checkpoints/step_…`` with the weights in fp32, and ``recipe.yaml``.

    There is no optimizer state: the checkpoint can be evaluated and exported, and is where
    ``sparsellm train --init-from`` begins; it is not resumed.

    Args:
        source: a folder of Hugging Face's, exported by us or not, or a model of the hub.
        run_path: a new run folder.
        recipe: bundled name or file; default is the recipe that an export carries, else one of the
            model in config.json.

    Returns:
        The checkpoint, and the types that the weights had; ``F32`` alone lost nothing.

    Raises:
        FileNotFoundError, ValueError: the folder is damaged or not of the recipe's model, or
            ``run_path`` has files.
        CheckpointError: the checkpoint could not be written.
    """
    refuse_occupied(run_path)
    check_out(run_path, is_folder=True, option="RUN_DIR")
    if not is_hugging_face(local_copy(source)):
        raise ValueError(
            f"{source} is not an exported folder: it has no {CONFIG_FILE}; give one that "
            "`sparsellm export` wrote, or another of Hugging Face's"
        )
    loaded = load_pretrained(source, recipe=recipe)
    snapshot = Snapshot(
        step=int(loaded.trainer["step"]),
        model=state.gather_model(loaded.model),
        trainer=loaded.trainer,
        recipe_yaml=loaded.recipe.to_yaml(),
    )
    written = save(run_path / "checkpoints", snapshot, keep=1)
    write_atomically(run_path / checkpoint.RECIPE_FILE, snapshot.recipe_yaml)
    return written, stored_dtypes(loaded.path)
