"""`sparsellm.load`: a model for use in Python, with the tokenizer that goes with it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedModel as HFModel
from transformers import PreTrainedTokenizerBase as HFTokenizer

from sparsellm.device import default_dtype, pick_device
from sparsellm.ffn.accelerate import accelerate as put_kernels_under
from sparsellm.runs.hf_config import read_config
from sparsellm.runs.hf_folder import is_export, is_hugging_face, is_published
from sparsellm.runs.hf_tokenizer import stock_tokenizer
from sparsellm.runs.pretrained import find_checkpoint, load_pretrained


class Loaded(NamedTuple):
    """A model in evaluation mode, and its tokenizer."""

    model: HFModel
    tokenizer: HFTokenizer


def load(
    path_or_id: str | PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    accelerate: bool = True,
) -> Loaded:
    """A model and its tokenizer, as transformers' own classes, ready for ``generate``.

    Weights that sparsellm trained or exported, and the paper's published checkpoints, are read as
    `sparsellm generate` reads them; any other folder as stock transformers does. Code that lies in
    a folder is never run.

    Args:
        path_or_id: a run, a checkpoint, an exported folder, a folder of Hugging Face's, or a model
            of the hub (``owner/name``, ``owner/name@revision``).
        device: such as ``cuda:1``; default is a GPU if there is one.
        dtype: of the weights; default is bf16 on a GPU and fp32 on a CPU.
        accelerate: on a GPU, put the sparse kernels under the FFNs that they support, with the
            defaults of `sparsellm.accelerate`. Each layer runs dense where that is faster, and
            models without ReLU or ReLU² stay as they are.

    Returns:
        ``(model, tokenizer)``.

    Raises:
        FileNotFoundError: there is no such model; the message says what was looked for.
        ValueError: it is damaged or cannot be read; no such device.
    """
    path = Path(path_or_id)
    on = pick_device(None if device is None else str(device))
    dtype = dtype or default_dtype(on)
    found = find_checkpoint(path)
    if is_hugging_face(found) and not is_export(found):
        loaded = load_stock(str(path), found, on, dtype)
    else:
        ours = load_pretrained(path, on, dtype)
        most = ours.recipe.model.max_position_embeddings
        loaded = Loaded(ours.model, stock_tokenizer(ours.recipe.data.tokenizer, most))
    if accelerate and on.type == "cuda":
        put_kernels_under(loaded.model)
    return loaded


def load_stock(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    """A Hugging Face folder by transformers alone; those of the paper by their fields.

    Raises:
        ValueError: it cannot be loaded; the message has the ``name`` that the user gave, and why.
    """
    if is_published(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, config=read_config(folder))
        return Loaded(load_pretrained(folder, device, dtype).model, tokenizer)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, remote code among them
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{name}: transformers cannot load it: {reason}") from error
    return Loaded(model.to(device).eval(), tokenizer)
