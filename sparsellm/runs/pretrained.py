"""A trained model for use: evaluation, generation, analysis and export all load it here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel as HFModel

from sparsellm.data.tokenizer import Tokenizer, load_tokenizer
from sparsellm.device import place
from sparsellm.model import build_zero_model
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.runs import checkpoint, hf_folder, state
from sparsellm.runs.checkpoint import ABANDONED
from sparsellm.runs.files import TrainerState, read_model
from sparsellm.runs.hf_tokenizer import check_tokenizer
from sparsellm.runs.hub import local_copy
from sparsellm.vocabulary import HF_PREFIX, TOKENIZER_FILE


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode with what belongs to it."""

    path: Path  # the checkpoint, or exported folder, that was read
    recipe: Recipe
    model: HFModel
    tokenizer: Tokenizer
    trainer: dict[str, Any]  # step, tokens, world_size and versions of the run


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path refers to.

    ``owner/name`` that does not exist locally is a model on the hub, which is downloaded. Otherwise
    it is the path itself if it is a checkpoint or an exported folder, or the latest checkpoint of a
    run or `checkpoints` folder.

    Raises:
        FileNotFoundError: there is none; the message says what was looked for.
    """
    path = local_copy(path)
    if checkpoint.is_checkpoint(path) or hf_folder.is_export(path):
        return path
    for candidate in (path, path / "checkpoints"):
        if candidate.is_dir() and (found := checkpoint.latest(candidate)):
            return found
    if hf_folder.is_hugging_face(path):
        raise FileNotFoundError(
            f"{path} has no {hf_folder.EXPORT_RECIPE_FILE}; `sparsellm import {path} RUN_DIR "
            "--recipe RECIPE` makes a checkpoint of it"
        )
    if ABANDONED in path.parts and not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: a branch that was resumed is in checkpoints/ again; without "
            "--resume the training command goes on from there"
        )
    raise FileNotFoundError(
        f"{path} is not a checkpoint ({checkpoint.TRAINER_FILE} and {checkpoint.MODEL_FILE}), a "
        "run folder with checkpoints/ or an exported folder; give such as runs/debug"
    )


def load_pretrained(
    path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Pretrained:
    """Builds the model of a checkpoint's recipe and loads its weights.

    Raises:
        FileNotFoundError: no checkpoint there, or a file of it is missing.
        ValueError: a file is truncated, or weights and recipe do not match.
    """
    found = find_checkpoint(path)
    if hf_folder.is_export(found):
        return load_export(found, None, device, dtype)
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
    """As `load_pretrained`, from an exported folder.

    Args:
        path: the folder.
        recipe: bundled name or file; default is the one in the folder.
        device: where the model goes.
        dtype: of its weights.

    Raises:
        FileNotFoundError: no such folder, a file is missing, or there is no recipe.
        ValueError: a file is damaged, or recipe, configuration, weights and tokenizer differ.
    """
    if not hf_folder.is_hugging_face(path):
        raise FileNotFoundError(
            f"{path} is not an exported folder: it has no {hf_folder.CONFIG_FILE}; give one that "
            "`sparsellm export` wrote"
        )
    if recipe is None and not hf_folder.is_export(path):
        raise FileNotFoundError(
            f"{path} has no {hf_folder.EXPORT_RECIPE_FILE}; name the model that the weights are of "
            "with --recipe"
        )
    loaded = _recipe_of(path, recipe)
    hf_folder.check_config(path, loaded)
    tokenizer = load_tokenizer(loaded.data.tokenizer)
    check_tokenizer(path, tokenizer)
    model = _model(loaded, tokenizer, hf_folder.read_weights(path), str(path))
    model = place(model, device, dtype)
    return Pretrained(path, loaded, model, tokenizer, hf_folder.read_trainer(path))


def load_recipe_of(path: Path) -> Recipe:
    """The recipe of a checkpoint or exported folder, without its weights.

    Raises:
        FileNotFoundError, ValueError: it is missing or damaged.
    """
    exported = hf_folder.is_export(path)
    return load_recipe(
        str(path / (hf_folder.EXPORT_RECIPE_FILE if exported else checkpoint.RECIPE_FILE))
    )


@dataclass(frozen=True)
class Weights:
    """Weights for ``train --init-from``, on the CPU and in their stored type."""

    path: Path
    recipe: Recipe  # that they were trained with
    tensors: dict[str, Tensor]
    trainer: dict[str, Any]


def read_weights(path: Path) -> Weights:
    """The weights of a checkpoint, run or exported folder, without a model around them.

    Raises:
        FileNotFoundError: no checkpoint there, or a file of it is missing.
        ValueError: a file is truncated.
    """
    found = find_checkpoint(path)
    if hf_folder.is_export(found):
        recipe = _recipe_of(found)
        return Weights(found, recipe, hf_folder.read_weights(found), hf_folder.read_trainer(found))
    checkpoint.check_files(found, [checkpoint.TRAINER_FILE, checkpoint.RECIPE_FILE])
    trainer = read_model(found / checkpoint.TRAINER_FILE, TrainerState, checkpoint.REMEDY)
    recipe = load_recipe(str(found / checkpoint.RECIPE_FILE))
    tensors = checkpoint.read_kind(found, checkpoint.MODEL)
    return Weights(found, recipe, tensors, trainer)


def _recipe_of(export: Path, recipe: str | None = None) -> Recipe:
    """The recipe of an export; a tokenizer of Hugging Face's is taken from the same folder."""
    loaded = load_recipe(recipe or str(export / hf_folder.EXPORT_RECIPE_FILE))
    if loaded.data.tokenizer.startswith(HF_PREFIX) and (export / TOKENIZER_FILE).is_file():
        data = loaded.data.model_copy(update={"tokenizer": f"{HF_PREFIX}{export.resolve()}"})
        loaded = loaded.model_copy(update={"data": data})
    return loaded


def _model(
    recipe: Recipe, tokenizer: Tokenizer, tensors: dict[str, Tensor], source: str
) -> HFModel:
    model = build_zero_model(recipe, tokenizer.eot_id)
    state.restore_model(model, tensors, source, "give the recipe that it was trained with")
    return model
