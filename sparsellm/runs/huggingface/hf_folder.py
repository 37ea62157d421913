"""What lies in a Hugging Face folder, exported by us or not, here or on the hub.

A model of the hub is given in place of a folder: ``owner/name[@revision]``. Only what reads tensors
imports torch.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from sparsellm.paths import hub_id
from sparsellm.recipe import Recipe
from sparsellm.recipe.families import PUBLISHED
from sparsellm.recipe.strict import read_json, read_model
from sparsellm.recipe.vocabulary import CONFIG_FILE, TOKENIZER_FILES
from sparsellm.runs import checkpoint
from sparsellm.runs.files import read_tensors
from sparsellm.waiting import warn

if TYPE_CHECKING:
    from torch import Tensor

EXPORT_RECIPE_FILE = "sparsellm_recipe.yaml"
EXPORT_TRAINER_FILE = "sparsellm_trainer.json"  # step and tokens of the run
ADAPTER_FILE = "adapter_config.json"
INDEX_FILE = "model.safetensors.index.json"  # where there is more than one shard
_EMBEDDING = "model.embed_tokens.weight"

# What a model is read from; a repository may hold other frameworks' weights too.
_FILES = ["*.json", "*.safetensors", "*.yaml", *TOKENIZER_FILES, "LICENSE*", "NOTICE*", "*.md"]
# Its publisher's own copy of the weights, as Llama and Mistral have.
_NOT_READ = ["consolidated*", "*/*.safetensors"]

REMEDY = "export the checkpoint again, or put the model's own file back"
CHANGED = (
    f"if the model was changed after its export, delete {EXPORT_RECIPE_FILE} there, and it is read "
    f"by its {CONFIG_FILE}; else {REMEDY}"
)


class _ShardIndex(BaseModel):
    model_config = ConfigDict(extra="allow")

    weight_map: dict[str, str] = Field(min_length=1)  # shard of each tensor


class _Tokenizer(BaseModel):
    identity: str
    eot_id: NonNegativeInt


class _Trainer(BaseModel):
    step: NonNegativeInt
    tokens: NonNegativeInt = 0
    tokenizer: _Tokenizer | None = None


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
    content = read_model(file, _Trainer, REMEDY)
    return {key: value for key, value in content.items() if key != "tokenizer"}


def exported_tokenizer(path: Path) -> dict[str, Any]:
    """Identity and end-of-document id of the tokenizer of an export; empty where it has none."""
    file = path / EXPORT_TRAINER_FILE
    return (read_model(file, _Trainer, REMEDY) if file.is_file() else {}).get("tokenizer") or {}


def warn_of_two_models(path: Path) -> None:
    """Warns where a folder has a single file of weights beside an index of shards that are there.

    Raises:
        ValueError: the index is damaged.
    """
    if not all((path / name).is_file() for name in (checkpoint.MODEL_FILE, INDEX_FILE)):
        return
    shards = sorted(set(_shard_of(path).values()) - {checkpoint.MODEL_FILE})
    if shards and all((path / shard).is_file() for shard in shards):
        warn(
            f"{path} has two models: {checkpoint.MODEL_FILE}, which is read, as by transformers, "
            f"and {INDEX_FILE} with {shards[0]} and so on, which are not. Delete the ones that are "
            "not the model's"
        )


def refuse_adapter(path: Path) -> None:
    """Raises ValueError for a folder of PEFT's with the model that its adapter changes."""
    if (path / ADAPTER_FILE).is_file():
        raise ValueError(
            f"{path / ADAPTER_FILE}: the adapter would not be read, only the weights beside it; "
            "merge it: `PeftModel.from_pretrained(…).merge_and_unload().save_pretrained(…)`"
        )


def _shard_of(path: Path) -> dict[str, str]:
    places: dict[str, str] = read_model(path / INDEX_FILE, _ShardIndex, REMEDY)["weight_map"]
    return places


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors in the type in which they lie in the shards, on the CPU.

    Where a folder has one file and an index of shards, it is the file, as in stock transformers,
    and a warning says so.

    Raises:
        FileNotFoundError: there are no safetensors, or a shard is missing.
        ValueError: a shard is truncated, or does not hold what the index says; the weights are in
            another format; or there is an adapter.
    """
    refuse_adapter(path)
    index_file, single = path / INDEX_FILE, path / checkpoint.MODEL_FILE
    if not (single.is_file() or index_file.is_file()) and (other := sorted(path.glob("*.bin"))):
        raise ValueError(
            f"{other[0]}: only weights in safetensors are read; "
            "`AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)` writes them"
        )
    if single.is_file() or not index_file.is_file():
        warn_of_two_models(path)
        return read_tensors(single, REMEDY)
    places = _shard_of(path)
    tensors: dict[str, Tensor] = {}
    # The index names files: only those of this folder are opened.
    for shard in sorted(set(places.values())):
        if shard in ("", "..") or shard != Path(shard).name:
            raise ValueError(f"{index_file}: the shard {shard!r} is not in the folder")
        shard_tensors = read_tensors(path / shard, f"{REMEDY} ({INDEX_FILE} names it)")
        if odd := sorted(shard_tensors.keys() ^ {name for name in places if places[name] == shard}):
            raise ValueError(f"{path / shard} and {INDEX_FILE} differ, such as {odd[0]}; {REMEDY}")
        tensors |= shard_tensors
    return tensors


def model_weights(path: Path, recipe: Recipe) -> dict[str, Tensor]:
    """The tensors of the recipe's model. Stock transformers ignores the same other tensors.

    The paper's training saved W_down transposed, (intermediate_size, hidden_size): its shape tells.

    Raises:
        FileNotFoundError, ValueError: as `read_weights`, or an output layer that ought to be the
            embedding is another one.
    """
    import torch

    tensors = read_weights(path)
    if recipe.model.tie_word_embeddings and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        embedding = tensors.setdefault(_EMBEDDING, head)  # it may be stored under either name
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise ValueError(
                f"{path}: lm_head.weight is not {_EMBEDDING}, although the model has "
                'tie_word_embeddings: with "tie_word_embeddings": false in config.json it is an '
                "output layer of its own; otherwise delete it"
            )
    shape = recipe.model.intermediate_size, recipe.model.hidden_size
    transposed = is_published(path) and shape[0] != shape[1]
    return {
        name: tensor.t().contiguous()
        if transposed and name.endswith("mlp.down_proj.weight") and tensor.shape == shape
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")  # earlier versions of transformers saved it
    }


def is_published(path: Path) -> bool:
    """Whether a folder is one of the paper's checkpoints, by the ``model_type`` of its own code."""
    return read_json(path / CONFIG_FILE, REMEDY).get("model_type") in PUBLISHED


def results_place(source: Path, folder: Path) -> Path:
    """The path beside which results of a model belong; not in the hub's cache. It has a name."""
    name = hub_id(source)
    if name is not None:
        return Path(name.replace("/", "--"))
    return folder if folder.name not in ("", "..") else folder.resolve()


@cache
def _say_asking(name: str) -> None:
    """Once: without a network the answer takes half a minute."""
    note = f"{name}: no folder here has this name; asking the Hugging Face hub"
    print(note, file=sys.stderr, flush=True)


def local_copy(path: Path) -> Path:
    """The path itself, or the folder of the cache that holds this model of the hub.

    Raises:
        FileNotFoundError: there is neither, or the hub cannot be reached.
    """
    name = hub_id(path)
    if name is None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    repo, _, revision = name.partition("@")
    _say_asking(name)
    try:
        folder = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=_FILES,
            ignore_patterns=_NOT_READ,
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise FileNotFoundError(
            f"{name}: no such folder here, and no such model on the Hugging Face hub (one that is "
            "private needs `hf auth login`)"
        ) from error
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{name}: no such folder here, and the Hugging Face hub cannot be read ({reason})"
        ) from error
    return Path(folder)
