"""Models that were not trained here, as baselines: any that transformers loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel as HFModel
from transformers import PreTrainedTokenizerBase as HFTokenizer

from sparsellm.runs.load import load_stock

_USUAL_CONTEXT = 2048  # of a model that does not say


@dataclass(frozen=True)
class Foreign:
    """A model in evaluation mode, with its own tokenizer."""

    name: str  # as the user gave it
    path: Path
    model: HFModel
    tokenizer: HFTokenizer
    context_length: int  # tokens


def load_foreign(name: str, path: Path, device: torch.device, dtype: torch.dtype) -> Foreign:
    """Reads a Hugging Face folder without running code that lies in it.

    Raises:
        ValueError: it cannot be loaded; the message says why. Or its tokenizer has no token to put
            before a text without context.
    """
    model, tokenizer = load_stock(name, path, device, dtype)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"{name}: its tokenizer has neither a beginning-of-text nor an end-of-text token, one "
            "of which lm-eval puts before a text without context: name it as eos_token in "
            f"{path / 'tokenizer_config.json'}"
        )
    context = getattr(model.config, "max_position_embeddings", None) or _USUAL_CONTEXT
    return Foreign(name, path, model, tokenizer, int(context))
