#!/bin/sh
# Question: a LoRA adapter lies in a folder. It is merged, and the merged model is saved to the same folder,
#   `model.merge_and_unload().save_pretrained(folder)`. What does AutoModelForCausalLM.from_pretrained(folder) load?
# Guess: the merged model. merge_and_unload returns a plain model, and the folder has a whole model now.
# Seen (transformers 5.23.0, peft 0.21.2): the merged weights with the adapter on top, so the update of LoRA counts
#   twice. The files of the adapter stay in the folder, and from_pretrained applies an adapter that it finds beside a
#   model's weights, without a message. Further training of the merged model changes nothing about it. In an empty
#   folder, the merged model is loaded as it was saved.
# Hurts: scripts that merge "in place", in the output folder of the fine-tuning. What is evaluated and served has twice
#   the update: often still fluent, and worse.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
torch.manual_seed(0)
base, folder, other = (f"{sys.argv[1]}/{name}" for name in ("base", "adapter", "merged"))
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(base)


def weight(model):
    """The matrix that the first up-projection multiplies by, with its adapter if it has one."""
    layer = model.model.layers[0].mlp.up_proj
    if hasattr(layer, "base_layer"):
        return layer.base_layer.weight + layer.get_delta_weight("default")
    return layer.weight


original = weight(AutoModelForCausalLM.from_pretrained(base)).detach()
adapted = get_peft_model(
    AutoModelForCausalLM.from_pretrained(base),
    LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False),  # random, as after training
)
adapted.save_pretrained(folder)
merged = adapted.merge_and_unload()
update = weight(merged).detach() - original
seen = {}
for name, place in (("an empty folder", other), ("the adapter's folder", folder)):
    merged.save_pretrained(place)
    loaded = AutoModelForCausalLM.from_pretrained(place)
    seen[name] = ((weight(loaded).detach() - original).norm() / update.norm()).item()
    print(f"merged model saved to {name}: loaded with {seen[name]:.2f} times LoRA's update", flush=True)
assert abs(seen["an empty folder"] - 1) < 1e-3
assert abs(seen["the adapter's folder"] - 2) < 1e-3, "the behaviour has changed"
PY
