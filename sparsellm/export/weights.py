"""Weights, ``config.json`` and ``generation_config.json``, written by transformers itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
    pretrained.model.save_pretrained(folder, max_shard_size=max_shard_size)
    _state_rope_twice(folder / CONFIG_FILE)


def _state_rope_twice(path: Path) -> None:
    # transformers 5 has `rope_parameters`; version 4 and readers of its files look for
    # `rope_theta` and `rope_scaling`, and would silently take 10,000 and none otherwise.
    config = json.loads(path.read_text(encoding="utf-8"))
    scaling = dict(config["rope_parameters"])
    config["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        config["rope_scaling"] = scaling
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
