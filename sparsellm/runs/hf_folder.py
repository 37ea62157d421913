"""Reads exported folders: files, weights, and checks that they agree with one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsellm.model import model_config
from sparsellm.recipe import Recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.files import TrainerState, damaged, read_model, read_tensors

EXPORT_RECIPE_FILE = "sparsellm_recipe.yaml"
EXPORT_TRAINER_FILE = "sparsellm_trainer.json"  # step and tokens of the run
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"  # where there is more than one shard

_REMEDY = "export the checkpoint again"
# What of config.json decides the function that the weights compute.
_COMPARED = (
    "model_type",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)


class _ShardIndex(BaseModel):
    model_config = ConfigDict(extra="allow")

    weight_map: dict[str, str] = Field(min_length=1)  # shard of each tensor


def is_export(path: Path) -> bool:
    """Whether `sparsellm export` wrote it."""
    return (path / EXPORT_RECIPE_FILE).is_file()


def is_hugging_face(path: Path) -> bool:
    """Whether a folder is in Hugging Face's format, exported by us or not."""
    return (path / CONFIG_FILE).is_file()


def read_trainer(path: Path) -> dict[str, Any]:
    """Step and tokens of the exported run; step 0 for a folder that we did not write."""
    file = path / EXPORT_TRAINER_FILE
    if not file.is_file():
        return {"step": 0, "tokens": 0}
    return read_model(file, TrainerState, _REMEDY)


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors in the type in which they lie in the shards, on the CPU.

    Raises:
        FileNotFoundError: there are no weights, or a shard is missing.
        ValueError: a shard is truncated, or has not what the index says.
    """
    index_file = path / INDEX_FILE
    if not index_file.is_file():
        return read_tensors(path / checkpoint.MODEL_FILE, _REMEDY)
    places: dict[str, str] = read_model(index_file, _ShardIndex, _REMEDY)["weight_map"]
    tensors: dict[str, Tensor] = {}
    for name, shard in places.items():
        if shard != Path(shard).name or shard == "..":
            raise ValueError(f"{index_file}: the shard {shard!r} of {name} is not in the folder")
    for shard in sorted(set(places.values())):
        found = read_tensors(path / shard, _REMEDY)
        expected = {name for name, place in places.items() if place == shard}
        if found.keys() != expected:
            odd = sorted(found.keys() ^ expected)[0]
            raise ValueError(f"{path / shard} and {INDEX_FILE} differ, such as {odd}; {_REMEDY}")
        tensors |= found
    return tensors


def stored_dtypes(path: Path) -> list[str]:
    """Types of the tensors in the shards, such as ``BF16`` and ``F32``."""
    found = set()
    for shard in path.glob("*.safetensors"):
        try:
            with safe_open(shard, framework="pt") as tensors:
                found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise damaged(shard, error, _REMEDY) from error
    return sorted(found)


def check_config(path: Path, recipe: Recipe) -> None:
    """Compares ``config.json`` with the recipe's model.

    Raises:
        ValueError: it is damaged, or a value that changes the model's function differs.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    wrong = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
    file = path / CONFIG_FILE
    try:
        found = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (*wrong, RecursionError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:200]  # transformers goes on for paragraphs
        raise ValueError(f"{file} cannot be read ({reason}); {_REMEDY}") from error
    if getattr(found, "quantization_config", None) is not None:
        raise ValueError(
            f"{file} has a quantization_config, and quantised weights are not read; save the model "
            "in float32 or bfloat16"
        )
    expected = model_config(recipe, eos_token_id=0)
    for key in _COMPARED:
        has, wants = getattr(found, key, None), getattr(expected, key, None)
        if has != wants:
            raise ValueError(
                f"{file}: {key} is {has!r} and the recipe's model has {wants!r}; give the recipe "
                "that the weights were trained with"
            )
