"""Models of stock transformers that tests of accelerated models share."""

from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "relu",
    "max_position_embeddings": 64,
}


def small_model(family: str = "Llama", **fields: Any) -> transformers.PreTrainedModel:
    """Random weights in bf16, always the same.

    ``family`` is the prefix of transformers' classes, ``fields`` are of its configuration.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **fields})
    return getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().eval()
