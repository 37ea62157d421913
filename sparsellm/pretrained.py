"""A trained model for use: evaluation, generation, analysis and export all load it here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel as HFModel

from sparsellm import checkpoint, state
from sparsellm.data import load_tokenizer
from sparsellm.data.tokenizer import Tokenizer
from sparsellm.model import build_model
from sparsellm.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode with what belongs to it."""

    path: Path  # the checkpoint that was read
    recipe: Recipe
    model: HFModel
    tokenizer: Tokenizer
    trainer: dict[str, Any]  # step, tokens, world_size and versions of the run


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the latest of a run or `checkpoints` folder.

    Raises:
        FileNotFoundError: there is none; says what was looked for.
    """
    if (path / checkpoint.TRAINER_FILE).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and (found := checkpoint.latest(folder)):
            return found
    raise FileNotFoundError(
        f"{path} is no checkpoint ({checkpoint.TRAINER_FILE} and {checkpoint.MODEL_FILE}) and no "
        "run folder with checkpoints/; give such as runs/debug"
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
    trainer = checkpoint.read_json(found / checkpoint.TRAINER_FILE)
    recipe = load_recipe(str(found / checkpoint.RECIPE_FILE))
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    model = build_model(recipe, tokenizer.eot_id)
    state.restore_model(model, checkpoint.read_tensors(found / checkpoint.MODEL_FILE))
    return Pretrained(found, recipe, model.to(device, dtype).eval(), tokenizer, trainer)
