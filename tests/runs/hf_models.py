"""Tiny random models of stock transformers' classes, in folders as people have them."""

import json
from pathlib import Path

import tokenizers
import torch
import transformers
from conftest import ROOT
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


CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
_CORPUS = "In 2024 the cats, dogs and Document 1. sat on it. Q: why? A: because of 2,048 zeros.\n"


def write_chat_model(folder, template="<bos> $A", **shape):
    """A folder of a model that others trained to answer: a text begins with <bos> (id 0) and ends
    with <eos> or <|im_end|> (1, 2), and all of its settings are their own."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<|im_end|>", "<pad>", "<unk>"]
    tokenizer.train_from_iterator(
        [_CORPUS] * 9,
        tokenizers.trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=special,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    ids = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 3}
    fields = {**SHAPE, **ids, "vocab_size": 344, **shape}
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.generation_config = transformers.GenerationConfig(
        **ids, do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    written |= {"additional_special_tokens": ["<|im_end|>"], "model_max_length": 48}
    written |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "LICENSE").write_text("Permission is granted.\n")
    (folder / "USAGE.md").write_text("Ask it.\n")
    return folder


def short_text(folder: Path) -> list[str]:
    """Overrides for text in the folder that a tokenizer of Hugging Face's takes no time for."""
    file = folder / "text.jsonl"
    paragraphs = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("\n\n")
    file.write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs))
    return ["data.corpus=local", f"data.files=[{file}]", "data.validation_fraction=0.2"]
