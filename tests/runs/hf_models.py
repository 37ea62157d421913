"""Tiny random models of stock transformers' classes, in folders as people have them."""

from __future__ import annotations

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from sparsellm.runs.huggingface.hf_tokenizer import write_tokenizer

SHAPE = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Prefix of transformers' classes, and what differs from `SHAPE` and from their defaults.
MODELS = {
    "Llama 2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "Llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "Llama, biases, dropout": ("Llama", {"attention_bias": True, "attention_dropout": 0.1}),
    "SmolLM": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 2, "vocab_size": 257}),
    "Mistral 0.1": ("Mistral", {"sliding_window": 24}),
    "Mistral Nemo": ("Mistral", {"sliding_window": None, "head_dim": 10}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "Qwen2, windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "Qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "SmolLM3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "Arcee": ("Arcee", {}),
    # As the paper's checkpoints.
    "ReLU, tied": (
        "Llama",
        {
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "ReLU, no gate": ("Arcee", {"hidden_act": "relu", "tie_word_embeddings": True}),
    "ReLU, Qwen2": ("Qwen2", {"hidden_act": "relu"}),
}
# What their config.json has beside that.
PUBLISHED = {
    "model_type": "llama_sparse_relu",
    "architectures": ["LlamaSparseReluForCausalLM"],
    "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    "hidden_act": "silu",
    "mlp_bias": False,
    "sparsity_gated_mlp": True,
    "sparsity_new_intermediate_size": None,
}


def stock_model(name):
    """In evaluation mode; every parameter is random, biases and norms too."""
    prefix, fields = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **fields})
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_model(model, folder):
    """A folder of it with a tokenizer."""
    model.save_pretrained(folder)
    write_tokenizer("bytes", folder, 64)
    return folder


def change(folder, fields, transform=lambda name, tensor: tensor):
    """Replaces fields of config.json (None deletes one) and tensors."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    weights = load_file(folder / "model.safetensors")
    changed = {name: transform(name, tensor).contiguous() for name, tensor in weights.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def logits(model, length=40):
    """Of two sequences, longer than the windows above."""
    tokens = torch.randint(257, (2, length), generator=torch.Generator().manual_seed(5))
    return model(tokens.to(model.device)).logits
