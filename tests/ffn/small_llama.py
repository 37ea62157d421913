"""The model of stock transformers that tests of accelerated models share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(**fields: Any) -> LlamaForCausalLM:
    """Two blocks with random weights in bf16, always the same; ``fields`` of the configuration."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="relu",
        **fields,
    )
    return LlamaForCausalLM(config).bfloat16().eval()
