#!/bin/sh
# Question: a Llama has bf16 weights, but its norms are kept and trained in fp32, and save_pretrained writes both as they
#   are. Which dtype do the norms have after from_pretrained(folder), or with dtype="auto"?
# Guess: fp32. Every tensor of a safetensors file has its own dtype.
# Seen (transformers 5.23.0): bf16. All tensors are cast to one dtype, that of the config, so a scale of 1.001 becomes 1.0.
#   The config's dtype is that of the model's first parameter. If that is fp32, as when only the embedding is, the
#   whole model is loaded in fp32, with twice the memory. There is no message. dtype=torch.float32 keeps all values.
# Hurts: mixed precision by parts: norms, routers or heads in fp32. What fine-tuning changed in them by less than 0.4% is
#   lost on the way, so a reloaded model is not the one that was evaluated; the file itself is right.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def save(folder, parts):
    """Saves a bf16 model whose parameters with `parts` in their name are fp32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    for name, parameter in model.named_parameters():
        if parts in name:
            parameter.data = parameter.data.float() + 1e-3
    model.save_pretrained(folder)


seen = {}
for parts in ("norm", "embed_tokens"):
    folder = f"{sys.argv[1]}/{parts}"
    save(folder, parts)
    stored = load_file(f"{folder}/model.safetensors")["model.norm.weight"]
    for name, options in {"default": {}, "auto": {"dtype": "auto"}, "fp32": {"dtype": torch.float32}}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        norm = model.model.norm.weight
        seen[parts, name] = {parameter.dtype for parameter in model.parameters()}
        values = f"a scale of {stored[0].item():.6f} ({stored.dtype}) becomes {norm[0].item():.6f} ({norm.dtype})"
        print(f"fp32 {parts}, loaded with dtype {name}: {values}; dtypes {sorted(map(str, seen[parts, name]))}")
    if parts == "norm":
        assert stored.dtype == torch.float32 and abs(stored[0].item() - 1.001) < 1e-6
for name in ("default", "auto"):
    assert seen["norm", name] == {torch.bfloat16}, "the behaviour has changed"
    assert seen["embed_tokens", name] == {torch.float32}, "the behaviour has changed"
PY
