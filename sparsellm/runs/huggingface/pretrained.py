"""A model for use, trained here or not: `sparsellm.load`, generation, analysis and export."""

import functools
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel as HFModel,
    PreTrainedTokenizerBase as HFTokenizer,
)
from transformers.utils import is_peft_available

from sparsellm.data.tokenizer import Tokenizer, load_tokenizer
from sparsellm.decoding.sample import use_fast_generation
from sparsellm.device import pick_device, pick_dtype, place
from sparsellm.ffn.dispatch import check_choice
from sparsellm.ffn.inference_path.accelerate import Precision, accelerate as put_kernels_under
from sparsellm.model import build_zero_model
from sparsellm.recipe import Recipe
from sparsellm.recipe.vocabulary import HF_PREFIX, TOKENIZER_FILES
from sparsellm.runs import checkpoint, state
from sparsellm.runs.huggingface import hf_files, hf_folder
from sparsellm.runs.huggingface.find import find_checkpoint
from sparsellm.runs.huggingface.hf_generation import set_generation
from sparsellm.runs.huggingface.hf_tokenizer import (
    check_tokenizer,
    folder_tokenizer,
    stock_tokenizer,
)
from sparsellm.runs.huggingface.recipe_of import load_recipe_of
from sparsellm.runs.manifest import verify


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode with what belongs to it."""

    path: Path  # the checkpoint, or Hugging Face folder, that was read
    recipe: Recipe
    model: HFModel
    tokenizer: Tokenizer
    trainer: dict[str, Any]  # step, tokens, world_size and versions of the run
    stored: str  # type or types that the weights had where they were read, such as "bfloat16"

    @property
    def trained(self) -> bool:
        """Whether the weights were trained here: texts then followed the end-of-document token."""
        return bool(self.trainer["step"])

    @property
    def begin_ids(self) -> list[int]:
        """The ids that a text alone begins with, as in the model's training."""
        return [self.tokenizer.eot_id] if self.trained else self.tokenizer.begin_ids

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of a text that is to be continued, at least one.

        As in training; those of weights from elsewhere as their own tokenizer gives them, which
        finds special tokens in the text.
        """
        if self.trained:
            ids = self.tokenizer.encode_batch([text])[0].tolist()
        else:
            ids = self._prompt_tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*self.begin_ids, *ids] or [self.tokenizer.eot_id]

    @functools.cached_property
    def _prompt_tokenizer(self) -> HFTokenizer:
        return self.stock_tokenizer()

    @property
    def own_tokenizer(self) -> Path | None:
        """The folder of the tokenizer with which the model is used as it is, if there is one.

        That of weights from elsewhere is another than training's once they are trained here.
        """
        if self.trained and self.recipe.data.tokenizer.startswith(HF_PREFIX):
            return None
        return hf_files.tokenizer_of(self.path)

    def stock_tokenizer(self, **options: Any) -> HFTokenizer:
        """The tokenizer of transformers with which the model is used: its own, or training's.

        After training here, ``options`` are those of transformers' tokenizer.
        """
        if self.own_tokenizer is not None:
            return folder_tokenizer(self.own_tokenizer, **(options if self.trained else {}))
        most = self.recipe.model.max_position_embeddings
        return stock_tokenizer(self.recipe.data.tokenizer, most, **options)


@dataclass(frozen=True)
class Weights:
    """Weights for ``train --init-from``, on the CPU and in their stored type."""

    path: Path
    recipe: Recipe  # that they were trained with
    tensors: dict[str, Tensor]
    trainer: dict[str, Any]


def load_pretrained(
    path: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    recipe: str | None = None,
) -> Pretrained:
    """Builds the model of a checkpoint or Hugging Face folder and loads its weights.

    Args:
        path: see `find_checkpoint`.
        device: where the model goes.
        dtype: of its weights.
        recipe: of a Hugging Face folder, a bundled name or file; default is the one in the folder,
            else one from config.json.

    Raises:
        FileNotFoundError: no checkpoint there, or a file of it is missing.
        ValueError: a file is damaged; recipe, configuration, weights and tokenizer differ; or a
            Hugging Face folder is of another family than ours.
    """
    return build_pretrained(read_weights(path, recipe), device, dtype, recipe_given=bool(recipe))


def build_pretrained(
    weights: Weights, device: torch.device | str, dtype: torch.dtype, *, recipe_given: bool = False
) -> Pretrained:
    """As `load_pretrained`, from weights that were read; ``recipe_given``: their reader gave one.

    Raises:
        ValueError: recipe, configuration, weights and tokenizer differ.
    """
    remedy = "give the recipe that it was trained with"
    tokenizer, source = load_tokenizer(weights.recipe.data.tokenizer), str(weights.path)
    if hf_folder.is_hugging_face(weights.path):
        check_tokenizer(weights.path, tokenizer)
        remedy = remedy if recipe_given else hf_folder.REMEDY
    else:
        source = str(weights.path / checkpoint.MODEL_FILE)
    model = build_zero_model(weights.recipe, tokenizer.eot_id)
    padding = list(range(tokenizer.vocab_size, weights.recipe.padded_vocab_size))
    trained = bool(weights.trainer["step"])
    set_generation(
        model, tokenizer.eot_id, padding, hf_files.source_of(weights.path), trained=trained
    )
    state.restore_model(model, weights.tensors, source, remedy)
    model = place(model, device, dtype)
    types = sorted({str(tensor.dtype) for tensor in weights.tensors.values()})
    stored = ", ".join(types).replace("torch.", "")
    return Pretrained(weights.path, weights.recipe, model, tokenizer, weights.trainer, stored)


def read_weights(path: Path, recipe: str | None = None) -> Weights:
    """The weights of a checkpoint, run or Hugging Face folder, without a model around them.

    Of a run that trains meanwhile it is the newest checkpoint that can be read before it is pruned.
    ``recipe``: see `load_pretrained`.

    Raises:
        FileNotFoundError: no checkpoint there, or a file of it is missing.
        ValueError: a file is truncated.
    """

    def read(folder: Path) -> Weights:
        if hf_folder.is_hugging_face(folder):
            loaded = load_recipe_of(folder, path, recipe)
            tensors = hf_folder.model_weights(folder, loaded)
            return Weights(folder, loaded, tensors, hf_folder.read_trainer(folder))
        verify(folder, [checkpoint.RECIPE_FILE, *hf_files.carried_names(folder)])
        trainer = checkpoint.read_trainer(folder)
        loaded = load_recipe_of(folder)
        return Weights(folder, loaded, checkpoint.read_kind(folder, checkpoint.MODEL), trainer)

    return checkpoint.read_newest(lambda: find_checkpoint(path), read)


class Loaded(NamedTuple):
    """A model in evaluation mode, and its tokenizer."""

    model: HFModel
    tokenizer: HFTokenizer


def load(
    path_or_id: str | PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    accelerate: bool = True,
    precision: Precision = "model",
) -> Loaded:
    """Loads a model and its tokenizer as transformers' own classes, ready for ``generate``.

    Weights that sparsellm trained or exported, and the paper's published checkpoints, are read as
    `sparsellm generate` reads them. Any other folder is read as stock transformers reads it. Code
    in a folder is never run.

    Args:
        path_or_id: a run, a checkpoint, an exported folder, a Hugging Face folder, or a model on
            the Hub (``owner/name``, ``owner/name@revision``).
        device: such as ``cuda:1``. The default is a GPU if there is one.
        dtype: dtype of the weights, such as ``torch.bfloat16`` or ``bf16``. The default is bf16 on
            a GPU and fp32 on a CPU.
        accelerate: on a GPU, run the FFNs that the sparse kernels support on these kernels, with
            the defaults of `sparsellm.accelerate`, and let ``generate`` replay a CUDA graph for
            each token. Each layer runs dense where that is faster, and FFNs without ReLU or ReLU²
            stay as they are.
        precision: ``model``, its own type, or ``fp8``, which reads half the bytes of most
            weights: see `sparsellm.accelerate`.

    Returns:
        ``(model, tokenizer)``.

    Raises:
        FileNotFoundError: there is no such model; the message says what was searched for.
        ValueError: the model is damaged or cannot be read; there is no such device or dtype; the
            GPU does not support FP8; ``path_or_id`` is neither a path nor text.
    """
    if not isinstance(path_or_id, str | PathLike):
        kind = type(path_or_id).__name__
        raise ValueError(f"sparsellm.load takes a path or a model's name on the Hub, not {kind}")
    path = Path(path_or_id)
    on = pick_device(None if device is None else str(device))
    dtype = pick_dtype(dtype, on)
    folder = find_checkpoint(path)
    # Models from elsewhere as stock transformers builds them; our own with our FFN.
    if hf_folder.is_hugging_face(folder) and not hf_folder.is_export(folder):
        loaded = load_stock(str(path), folder, on, dtype)
    else:
        ours = load_pretrained(path, on, dtype)
        loaded = Loaded(ours.model, ours.stock_tokenizer())
    if accelerate:
        make_fast(loaded.model, precision)
    return loaded


def make_fast(model: HFModel, precision: Precision = "model") -> None:
    """On a GPU, puts the kernels under a model's FFNs, and the captured step under its generation.

    Raises:
        ValueError: an unknown ``precision``, or FP8 without a GPU that has it.
    """
    check_choice("precision", precision, Precision)
    if model.device.type == "cuda":
        put_kernels_under(model, precision=precision)
        use_fast_generation(model)
    elif precision != "model":
        raise ValueError(f"precision {precision} needs a GPU; on a CPU omit it")


def load_stock(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    """A Hugging Face folder by transformers alone; those of the paper by their fields.

    Raises:
        ValueError: it cannot be loaded; the message has the ``name`` that the user gave, and why.
    """
    if hf_folder.is_published(folder):
        return Loaded(load_pretrained(folder, device, dtype).model, folder_tokenizer(folder))
    hf_folder.warn_of_two_models(folder)
    if not is_peft_available():  # else transformers reads an adapter
        hf_folder.refuse_adapter(folder)
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"{name}: transformers cannot load it: {_reason(error)}") from error
    try:
        tokenizer = folder_tokenizer(folder)
    except Exception as error:
        if any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            reason = f"transformers cannot load its tokenizer: {_reason(error)}"
        else:
            reason = "it has no tokenizer; `AutoTokenizer.from_pretrained(…).save_pretrained(…)`"
            reason += " writes one into its folder"
        raise ValueError(f"{name}: {reason}") from error
    # transformers would leave these random, and only warn.
    for tensor, *shapes in sorted(loading_info["mismatched_keys"]):
        has, wants = map(tuple, shapes)
        raise ValueError(
            f"{name}: {tensor} has shape {has}, config.json asks for {wants}; {hf_folder.REMEDY}"
        )
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(
            f"{name}: the weights lack {len(missing)} tensors of the model in config.json, such as "
            f"{missing[0]}; {hf_folder.REMEDY}"
        )
    return Loaded(model.to(device).eval(), tokenizer)


def _reason(error: Exception) -> str:
    """Why transformers cannot load a folder, and the remedy."""
    if "trust_remote_code" in str(error):
        return (
            "it needs code that lies in its folder, which sparsellm never runs; load it with "
            "transformers, and call sparsellm.accelerate on the model"
        )
    # Of a missing key the text is the key alone.
    kind = f"{type(error).__name__} " if isinstance(error, KeyError) else ""
    return f"{kind}{shorten(str(error), 200)}; {hf_folder.REMEDY}"
