"""Weights, ``config.json`` and ``generation_config.json``, written by transformers itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers import GenerationConfig

from sparsellm.recipe import Recipe
from sparsellm.runs.hf_folder import CONFIG_FILE
from sparsellm.runs.pretrained import Pretrained

_SHARD_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB)")


def check_shard_size(max_shard_size: str) -> None:
    """Raises ValueError unless it looks like ``4GB``."""
    if not _SHARD_SIZE.fullmatch(max_shard_size):
        raise ValueError(f"--max-shard-size {max_shard_size!r}: write it as 4GB or 500MB")


def write_weights(pretrained: Pretrained, folder: Path, max_shard_size: str) -> None:
    """Writes the model in the type that it has.

    Except for the FFN module in each block, which has the stock module's parameter names, the model
    is transformers' own, so the stock class can read the saved weights.

    Args:
        pretrained: model and recipe.
        folder: an existing folder.
        max_shard_size: such as ``4GB`` (10⁹ bytes); a larger tensor is a shard of its own.
    """
    model = pretrained.model
    eot_id = pretrained.tokenizer.eot_id
    model.generation_config = generation_config(
        pretrained.recipe, pretrained.tokenizer.vocab_size, eot_id
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _state_rope_twice(folder / CONFIG_FILE, pretrained.recipe)


def generation_config(recipe: Recipe, vocab_size: int, eot_id: int) -> GenerationConfig:
    """Ends at ``<|endoftext|>`` and never gives an id that only pads the embedding."""
    padding = list(range(vocab_size, recipe.padded_vocab_size))
    return GenerationConfig(
        bos_token_id=eot_id,
        eos_token_id=eot_id,
        pad_token_id=eot_id,
        suppress_tokens=padding or None,
    )


def _state_rope_twice(path: Path, recipe: Recipe) -> None:
    # transformers 5 has `rope_parameters`; version 4 and readers of its files look for
    # `rope_theta` and would silently take 10,000 where it is absent.
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = recipe.model.rope_theta
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
