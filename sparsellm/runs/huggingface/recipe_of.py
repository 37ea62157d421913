"""The recipe of weights, and that of a run that begins with them.

Imports no torch, unless a `config.json` or a tokenizer is to be read as transformers reads it.
"""

from pathlib import Path

from sparsellm.recipe import Recipe, load_recipe
from sparsellm.recipe.changes import CHANGED, check_shapes, shapes_differ
from sparsellm.recipe.strict import read_json
from sparsellm.recipe.vocabulary import HF_PREFIX
from sparsellm.runs import checkpoint
from sparsellm.runs.huggingface import hf_files, hf_folder
from sparsellm.runs.huggingface.find import find_checkpoint

_REMEDY = "train a recipe of the same shapes"
_GIVEN = "give the recipe that the weights were trained with"
# Sizes for which a config.json has the names of a recipe.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")


def load_recipe_of(path: Path, source: Path | None = None, recipe: str | None = None) -> Recipe:
    """The recipe of a checkpoint or Hugging Face folder, without its weights.

    A tokenizer of Hugging Face's is the one that lies there, whatever became of its first place.

    Args:
        path: as `find_checkpoint` gives it.
        source: how it was named, such as a model of the hub.
        recipe: of a Hugging Face folder, a bundled name or file; default is the one in the folder,
            else one from `config.json`.

    Raises:
        FileNotFoundError, ValueError: it is missing or damaged, or see `derive_recipe`.
    """
    if not hf_folder.is_hugging_face(path):
        loaded = load_recipe(str(path / checkpoint.RECIPE_FILE))
        name = loaded.data.tokenizer
        if name.startswith(HF_PREFIX) and hf_files.tokenizer_of(path) is None:
            from sparsellm.runs.huggingface.hf_tokenizer import check_identity

            check_identity(path, name)
        return hf_files.with_own_tokenizer(loaded, path)
    from sparsellm.runs.huggingface.hf_config import check_config, derive_recipe

    if recipe is None and not hf_folder.is_export(path):
        return derive_recipe(path, source or path)
    loaded = load_recipe(recipe or str(path / hf_folder.EXPORT_RECIPE_FILE))
    loaded = hf_files.with_own_tokenizer(loaded, path)
    check_config(path, loaded, hf_folder.CHANGED if recipe is None else _GIVEN)
    if hf_folder.is_export(path) and loaded.data.tokenizer.startswith(HF_PREFIX):
        from sparsellm.runs.huggingface.hf_tokenizer import check_identity

        check_identity(path, loaded.data.tokenizer)
    return loaded


def recipe_to_train(
    name: str, overrides: list[str], init_from: Path | None, *, fresh: bool
) -> Recipe:
    """The recipe of a run, with the model of its first weights and a tokenizer that can be read.

    Raises:
        FileNotFoundError, ValueError: see `recipe_for` and `load_recipe`.
    """
    if init_from is None:
        recipe = load_recipe(name, overrides)
    else:
        recipe = recipe_for(name, overrides, init_from, fresh=fresh)
    return recipe if fresh else hf_files.with_tokenizer_at_hand(recipe)


def recipe_for(name: str, overrides: list[str], source: Path, *, fresh: bool = False) -> Recipe:
    """A recipe with the model and the tokenizer of the weights that it begins with.

    All else is the recipe's own, the context length and the activation among it. Overrides come
    last. A run that has a checkpoint resumes from it, unless ``fresh``, and no longer needs the
    weights: if they are gone, the model is that of the checkpoint.

    Raises:
        FileNotFoundError, ValueError: there are no such weights, the overrides give the model other
            shapes than theirs, a ramp begins with another activation, or see `load_recipe`.
    """

    def read(path: Path) -> tuple[Path, Recipe]:
        changes = _other_sizes(path, overrides)
        if changes and (fresh or _newest_of_run(name, overrides) is None):
            raise shapes_differ(str(path), changes, _REMEDY)
        return path, load_recipe_of(path, source)

    path = None
    try:
        path, weights = checkpoint.read_newest(lambda: find_checkpoint(source), read)
    except FileNotFoundError:
        newest = _newest_of_run(name, overrides)
        if fresh or newest is None:
            raise
        weights = load_recipe_of(newest)
    model = weights.model.model_dump(mode="json", exclude={"context_length"})
    instead = {
        "model": model,
        "ffn": {"gated": weights.ffn.gated},
        "data": {"tokenizer": weights.data.tokenizer},
    }
    recipe = load_recipe(name, overrides, instead)
    if path is not None and (fresh or checkpoint.latest(recipe.run_path / "checkpoints") is None):
        check_shapes(str(path), weights, recipe, _REMEDY)
        _check_ramp(path, weights.ffn.activation, recipe)
    return recipe


def _check_ramp(path: Path, activation: str, recipe: Recipe) -> None:
    """A ramp from another activation than that of the weights would begin with another model."""
    begin, end = recipe.ffn.ramp_from, recipe.ffn.activation
    if recipe.ffn.ramp_steps and begin != activation:
        remedy = "ffn.ramp_steps=0" if activation == end else f"ffn.ramp_from={activation}"
        raise ValueError(
            f"ffn.ramp_from: {begin}, but the model in {path} has {activation}: set {remedy}"
        )


def _newest_of_run(name: str, overrides: list[str]) -> Path | None:
    """The newest checkpoint of the run of a recipe whose model follows from its first weights."""
    # Without the weights' model other overrides may contradict the recipe.
    where = ("name", "logging.run_dir")
    place = [override for override in overrides if override.partition("=")[0].strip() in where]
    return checkpoint.latest(load_recipe(name, place).run_path / "checkpoints")


def _other_sizes(path: Path, overrides: list[str]) -> list[str]:
    """The changes (see `recipe_changes`) of sizes that a Hugging Face folder's `config.json` names.

    They are known before transformers, which loads torch, reads the file.
    """
    if not hf_folder.is_hugging_face(path) or hf_folder.is_published(path):
        return []
    config = read_json(path / hf_folder.CONFIG_FILE, hf_folder.REMEDY)
    texts = {key.strip(): text.strip() for key, _, text in (o.partition("=") for o in overrides)}
    sizes = {size: texts.get(f"model.{size}", "") for size in _SIZES}
    return [
        f"{CHANGED}model.{size} {config[size]} → {text}"
        for size, text in sizes.items()
        if text.isdecimal() and int(text) != config.get(size, int(text))
    ]
