"""A ``config.json`` of Hugging Face's: read, compared with a recipe, and made into one."""

import re
from pathlib import Path
from textwrap import shorten
from typing import Any

import transformers

from sparsellm.ffn.activations import ACTIVATIONS
from sparsellm.model import model_config
from sparsellm.paths import hub_id
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.recipe.families import ARCHITECTURES, PUBLISHED, unread_fields
from sparsellm.recipe.sections import HuggingFaceFields
from sparsellm.recipe.strict import read_json
from sparsellm.recipe.vocabulary import HF_PREFIX
from sparsellm.runs.huggingface.hf_folder import CONFIG_FILE, REMEDY, is_published

# What a recipe that is made from a configuration has besides the model.
_BASE = "0.5b"
_CONTEXT = 2048  # tokens: no longer are the sequences to train on and to analyze
# Keys of `model` that are Hugging Face's too.
_SAME_NAME = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "initializer_range", "tie_word_embeddings"),
)
# Fields of a configuration on which the logits do not depend, or only by way of others.
_NO_FUNCTION = {
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",  # layer_types
    "no_rope_layer_interval",  # no_rope_layers
    "pad_token_id",
    "pretraining_tp",
    "use_cache",
}


def read_config(path: Path) -> transformers.PretrainedConfig:
    """The configuration of a folder, as stock transformers has it; no code of the folder runs.

    Raises:
        ValueError: it is damaged, is of a model unknown to transformers, or has quantised
            weights.
    """
    file, published = path / CONFIG_FILE, is_published(path)
    try:
        if published:
            config = _published(read_json(file, REMEDY))
        else:
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        if getattr(config, "rope_parameters", None):
            # As when transformers builds a model: what the file says outside of RoPE's own fields
            # (original_max_position_embeddings) counts, which was read after them.
            config.standardize_rope_params()
        config.to_dict()
    except Exception as error:  # transformers raises many kinds
        reason = shorten(str(error), 200)  # transformers writes paragraphs
        raise ValueError(f"{file} cannot be read ({reason}); {REMEDY}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{file} has a quantization_config, and quantised weights are not read; save the model "
            "in float32 or bfloat16"
        )
    return config


def _published(content: dict[str, Any]) -> transformers.PretrainedConfig:
    """One of the paper's checkpoints: a stock block whose FFN is ReLU, whatever the file says.

    Where it says nothing, embeddings are tied and RoPE's base is 100,000, as in the paper's models.
    """
    gated, plain = PUBLISHED[content["model_type"]]
    family = gated if content.get("sparsity_gated_mlp", True) else plain
    if family is None:
        raise ValueError(f"sparsity_gated_mlp: false has no stock model with {gated}'s attention")
    replaced_fields = {"model_type", "auto_map", "architectures", "intermediate_size", "hidden_act"}
    fields = {
        name: value
        for name, value in content.items()
        if name not in replaced_fields and not name.startswith("sparsity_")
    }
    width = content.get("sparsity_new_intermediate_size") or content["intermediate_size"]
    usual = {"tie_word_embeddings": True, "rope_theta": 100_000.0}
    config_class = getattr(transformers, ARCHITECTURES[family].config_class)
    config: transformers.PretrainedConfig = config_class.from_dict(
        {**usual, **fields, "intermediate_size": width, "hidden_act": "relu"}
    )
    return config


def check_config(path: Path, recipe: Recipe, remedy: str) -> None:
    """Compares ``config.json`` with the recipe's model.

    Raises:
        ValueError: it is damaged, or a value that changes the model's function differs.
    """
    values = _function_of(read_config(path))
    for key, wants in _function_of(model_config(recipe, eos_token_id=0)).items():
        if (has := values.get(key)) != wants:
            raise ValueError(
                f"{path / CONFIG_FILE}: {key} is {has!r} and the recipe's model has {wants!r}; "
                f"{remedy}"
            )


def _function_of(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """The fields that decide what function the weights compute."""
    values = config.to_dict()
    common = transformers.PretrainedConfig().to_dict().keys() - {"model_type"}
    heads = max(1, values.get("num_attention_heads", 1))
    width = values.get("head_dim") or values.get("hidden_size", 0) // heads
    return {
        "model_type": config.model_type,
        **{k: v for k, v in values.items() if k not in _NO_FUNCTION | common},
        "head_dim": width,
        "is_causal": values.get("is_causal", True),  # a field of every model
    }


def derive_recipe(path: Path, source: Path) -> Recipe:
    """A recipe of the model in a folder, its tokenizer included; the rest is that of `_BASE`.

    Args:
        path: the folder.
        source: how it was named: a folder, or a model of the hub.

    Raises:
        ValueError: it is damaged, of a family that is not supported, or has a field that a recipe
            cannot hold; the message names it.
    """
    file = path / CONFIG_FILE
    config = _supported_config(path)
    architecture, values = ARCHITECTURES[config.model_type], config.to_dict()
    rope = dict(values["rope_parameters"])
    context = min(
        _CONTEXT, values["max_position_embeddings"], values.get("sliding_window") or _CONTEXT
    )
    model: dict[str, Any] = {
        "family": architecture.name,
        "rope_theta": rope.pop("rope_theta"),
        "vocab_size": values["vocab_size"],
        **{key: values[key] for key in _SAME_NAME},
        "context_length": context,
    }
    name = hub_id(source)
    instead: dict[str, dict[str, Any]] = {
        "model": model,
        "ffn": {"activation": values["hidden_act"], "gated": architecture.gated},
        "sparsity": {"target_nnz": None, "l1_coefficient": 0.0},
        "data": {"tokenizer": f"{HF_PREFIX}{path.resolve() if name is None else name}"},
        "train": {"global_batch_tokens": 512 * context},
    }
    model_name = Path((name or source.name).partition("@")[0]).name
    run_name = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name).lstrip("._-") or "model"
    overrides = [f"name='{run_name}'", f"description='{run_name}, from its config.json'"]
    try:
        # First without fields of `model.huggingface`: only what differs from this is named there.
        plain = load_recipe(_BASE, overrides, instead)
        model["huggingface"] = _further_fields(values, plain, rope)
        recipe = load_recipe(_BASE, overrides, instead)
        model_config(recipe, eos_token_id=0)  # refuses what transformers does not know
    except ValueError as error:
        raise ValueError(f"{file} cannot be made into a recipe: {error}") from error
    check_config(path, recipe, "that value cannot be carried by a recipe")
    return recipe


def _supported_config(path: Path) -> transformers.PretrainedConfig:
    """The configuration in a folder, if we have its family and its activation."""
    file = path / CONFIG_FILE
    # Read as plain JSON first: transformers' own error would not name the families that we have.
    kind = read_json(file, REMEDY).get("model_type")
    if kind not in [*ARCHITECTURES, *PUBLISHED]:
        raise _not_supported(file, kind)
    config = read_config(path)
    if config.model_type not in ARCHITECTURES:  # transformers takes some Mistrals for Ministrals
        raise _not_supported(file, config.model_type)
    activation = config.to_dict()["hidden_act"]
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{file}: hidden_act {activation!r} is not supported; valid "
            f"are {', '.join(ACTIVATIONS)}"
        )
    return config


def _not_supported(file: Path, kind: object) -> ValueError:
    valid = ", ".join([*ARCHITECTURES, *PUBLISHED])
    return ValueError(f"{file}: model_type {kind!r} is not supported; valid are {valid}")


def _further_fields(values: dict[str, Any], plain: Recipe, rope: dict[str, Any]) -> dict[str, Any]:
    """What `model.huggingface` must say, since it is not as in a recipe without it.

    Args:
        values: of the configuration.
        plain: the recipe without `model.huggingface`.
        rope: the configuration's RoPE without its theta, which has a key of its own.
    """
    usual = model_config(plain, eos_token_id=0).to_dict()
    further = {
        key: values[key]
        for key in HuggingFaceFields.__annotations__
        if key in values and values[key] != usual.get(key)
    }
    for key in unread_fields(plain.architecture, further):
        del further[key]
    further["max_position_embeddings"] = values["max_position_embeddings"]
    if "rope_parameters" in further:
        further["rope_parameters"] = rope
    return further
