"""A model for use, trained here or not: generation, analysis and export load it here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers import PreTrainedModel as HFModel

from sparsellm.data.tokenizer import Tokenizer, load_tokenizer
from sparsellm.device import place
from sparsellm.model import build_zero_model
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.runs import checkpoint, hf_folder, state
from sparsellm.runs.checkpoint import ABANDONED
from sparsellm.runs.files import TrainerState, read_model
from sparsellm.runs.hf_config import check_config, derive_recipe
from sparsellm.runs.hf_tokenizer import check_tokenizer
from sparsellm.runs.hub import local_copy
from sparsellm.vocabulary import HF_PREFIX, TOKENIZER_FILE


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode with what belongs to it."""

    path: Path  # the checkpoint, or Hugging Face folder, that was read
    recipe: Recipe
    model: HFModel
    tokenizer: Tokenizer
    trainer: dict[str, Any]  # step, tokens, world_size and versions of the run


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path refers to.

    ``owner/name`` that does not exist locally is a model on the hub, which is downloaded. Otherwise
    it is the path itself if it is a checkpoint or a folder of Hugging Face's, or the latest
    checkpoint of a run or `checkpoints` folder.

    Raises:
        FileNotFoundError: there is none; the message says what was looked for.
    """
    path = local_copy(path)
    if checkpoint.is_checkpoint(path) or hf_folder.is_hugging_face(path):
        return path
    for candidate in (path, path / "checkpoints"):
        if candidate.is_dir() and (found := checkpoint.latest(candidate)):
            return found
    if ABANDONED in path.parts and not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: a branch that was resumed is in checkpoints/ again; without "
            "--resume the training command goes on from there"
        )
    raise FileNotFoundError(
        f"{path} is not a checkpoint ({checkpoint.TRAINER_FILE} and {checkpoint.MODEL_FILE}), a "
        "run folder with checkpoints/ or a Hugging Face folder; give such as runs/debug"
    )


def load_pretrained(
    path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Pretrained:
    """Builds the model of a checkpoint's recipe and loads its weights.

    Raises:
        FileNotFoundError: no checkpoint there, or a file of it is missing.
        ValueError: a file is truncated, weights and recipe do not match, or a Hugging Face folder
            is of no family of ours.
    """
    found = find_checkpoint(path)
    if hf_folder.is_hugging_face(found):
        return load_export(path, None, device, dtype)
    weights = read_weights(found)
    tokenizer = load_tokenizer(weights.recipe.data.tokenizer)
    source = str(found / checkpoint.MODEL_FILE)
    model = place(_model(weights.recipe, tokenizer, weights.tensors, source), device, dtype)
    return Pretrained(found, weights.recipe, model, tokenizer, weights.trainer)


def load_export(
    path: Path,
    recipe: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Pretrained:
    """As `load_pretrained`, from a folder of Hugging Face's, exported by us or not.

    Args:
        path: the folder, or a model of the hub.
        recipe: bundled name or file; default is the one in the folder, else one from config.json.
        device: where the model goes.
        dtype: of its weights.

    Raises:
        FileNotFoundError: no such folder, or a file is missing.
        ValueError: a file is damaged, or recipe, configuration, weights and tokenizer differ.
    """
    given, path = path, local_copy(path)
    if not hf_folder.is_hugging_face(path):
        raise FileNotFoundError(
            f"{path} is not an exported folder: it has no {hf_folder.CONFIG_FILE}; give one that "
            "`sparsellm export` wrote, or another of Hugging Face's"
        )
    loaded = _recipe_of(path, given, recipe)
    check_config(path, loaded)
    tokenizer = load_tokenizer(loaded.data.tokenizer)
    check_tokenizer(path, tokenizer)
    model = _model(loaded, tokenizer, hf_folder.model_weights(path, loaded), str(path))
    model = place(model, device, dtype)
    return Pretrained(path, loaded, model, tokenizer, hf_folder.read_trainer(path))


def load_recipe_of(path: Path, given: Path | None = None) -> Recipe:
    """The recipe of a checkpoint or Hugging Face folder, without its weights.

    Args:
        path: as `find_checkpoint` gives it.
        given: how it was named, such as a model of the hub.

    Raises:
        FileNotFoundError, ValueError: it is missing or damaged, or see `derive_recipe`.
    """
    if hf_folder.is_hugging_face(path):
        return _recipe_of(path, given or path)
    return load_recipe(str(path / checkpoint.RECIPE_FILE))


def recipe_for(name: str, overrides: list[str], source: Path) -> Recipe:
    """A recipe with the model and the tokenizer of the weights that it begins with.

    All else is the recipe's own, the context length and the activation among it. Overrides come
    last.

    Raises:
        FileNotFoundError, ValueError: there are no such weights, or see `load_recipe`.
    """
    weights = load_recipe_of(find_checkpoint(source), source)
    model = weights.model.model_dump(mode="json", exclude={"context_length"})
    instead = {
        "model": model,
        "ffn": {"gated": weights.ffn.gated},
        "data": {"tokenizer": weights.data.tokenizer},
    }
    return load_recipe(name, overrides, instead)


@dataclass(frozen=True)
class Weights:
    """Weights for ``train --init-from``, on the CPU and in their stored type."""

    path: Path
    recipe: Recipe  # that they were trained with
    tensors: dict[str, Tensor]
    trainer: dict[str, Any]


def read_weights(path: Path) -> Weights:
    """The weights of a checkpoint, run or Hugging Face folder, without a model around them.

    Raises:
        FileNotFoundError: no checkpoint there, or a file of it is missing.
        ValueError: a file is truncated.
    """
    found = find_checkpoint(path)
    if hf_folder.is_hugging_face(found):
        recipe = _recipe_of(found, path)
        tensors = hf_folder.model_weights(found, recipe)
        return Weights(found, recipe, tensors, hf_folder.read_trainer(found))
    checkpoint.check_files(found, [checkpoint.TRAINER_FILE, checkpoint.RECIPE_FILE])
    trainer = read_model(found / checkpoint.TRAINER_FILE, TrainerState, checkpoint.REMEDY)
    recipe = load_recipe(str(found / checkpoint.RECIPE_FILE))
    tensors = checkpoint.read_kind(found, checkpoint.MODEL)
    return Weights(found, recipe, tensors, trainer)


def _recipe_of(folder: Path, given: Path, recipe: str | None = None) -> Recipe:
    """Of a Hugging Face folder; the tokenizer of an export is taken from the same folder."""
    if recipe is None and not hf_folder.is_export(folder):
        return derive_recipe(folder, given)
    loaded = load_recipe(recipe or str(folder / hf_folder.EXPORT_RECIPE_FILE))
    if loaded.data.tokenizer.startswith(HF_PREFIX) and (folder / TOKENIZER_FILE).is_file():
        data = loaded.data.model_copy(update={"tokenizer": f"{HF_PREFIX}{folder.resolve()}"})
        loaded = loaded.model_copy(update={"data": data})
    return loaded


def _model(
    recipe: Recipe, tokenizer: Tokenizer, tensors: dict[str, Tensor], source: str
) -> HFModel:
    model = build_zero_model(recipe, tokenizer.eot_id)
    # Ends at the end of a document, and gives no id that only pads the embedding.
    padding = list(range(tokenizer.vocab_size, recipe.padded_vocab_size))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.eot_id,
        eos_token_id=tokenizer.eot_id,
        pad_token_id=tokenizer.eot_id,
        suppress_tokens=padding or None,
    )
    state.restore_model(model, tensors, source, "give the recipe that it was trained with")
    return model
