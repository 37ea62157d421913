#!/bin/sh
# Question: a LoRA adapter of a mixture of experts was trained with transformers 4, where each expert was a layer of its own
#   (experts.0.gate_proj). PEFT converts it for transformers 5, which stacks the experts. Is the model the trained one?
# Guess: yes, or the adapter is refused. PEFT's conversion is exact on paper: it also doubles rank and alpha where the gate
#   and the up projection become one matrix, so that alpha / r stays.
# Seen (peft 0.21.2, transformers 5.24.0, CPU): only for plain LoRA on all layers' experts (no difference to the merged
#   weights). With use_rslora, the scale is alpha / sqrt(r): gate and up are applied sqrt(2) times too strongly. Alphas of
#   their own for gate and up (alpha_pattern) are replaced by the general one. Adapters of the layers that are dense
#   (mlp_only_layers; the first layers of DeepSeek and GLM) are dropped; in Qwen2-MoE, those of all routed experts are. The
#   warnings that come say that patterns "did not match any targeted module"; they also come where all is right.
# Hurts: whoever loads an older adapter: between a third and all of what it changed is wrong here, and nothing fails.
#   Merge old adapters with the versions that trained them.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import json
import os
import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

RANK, ALPHA = 4, 8
PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
shape = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)  # fmt: skip
qwen3 = shape | dict(head_dim=8)
cases = {  # the model, what differs in the adapter, whether it is loaded rightly
    "Qwen3-MoE, LoRA": (Qwen3MoeConfig(**qwen3), {}, True),
    "Qwen3-MoE, rank-stabilised LoRA": (Qwen3MoeConfig(**qwen3), dict(use_rslora=True), False),
    "Qwen3-MoE, alphas of their own": (
        Qwen3MoeConfig(**qwen3), dict(alpha_pattern={"gate_proj": 16, "up_proj": 16}), False),
    "Qwen3-MoE, the first layer dense": (Qwen3MoeConfig(**qwen3, mlp_only_layers=[0]), {}, False),
    "Qwen2-MoE": (Qwen2MoeConfig(**shape, shared_expert_intermediate_size=40), {}, False),
}  # fmt: skip
tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
for number, (name, (config, options, right)) in enumerate(cases.items()):
    torch.manual_seed(0)
    base, adapter, merged = (f"{sys.argv[1]}/{number}-{part}" for part in ("base", "adapter", "merged"))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.1) if weight.dim() > 1 else None
    model.save_pretrained(base)  # with the names of transformers 4
    weights = load_file(base + "/model.safetensors")
    lora = {}
    for key, weight in weights.items():
        module = key.removesuffix(".weight")
        projection = module.rsplit(".", 1)[-1]
        if projection in PROJECTIONS:
            a, b = 0.1 * torch.randn(RANK, weight.shape[1]), 0.3 * torch.randn(weight.shape[0], RANK)
            lora |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
            alpha = options.get("alpha_pattern", {}).get(projection, ALPHA)
            weights[key] = weight + alpha / (RANK**0.5 if options.get("use_rslora") else RANK) * b @ a
    os.makedirs(adapter)
    save_file(lora, adapter + "/adapter_model.safetensors")
    with open(adapter + "/adapter_config.json", "w") as file:
        json.dump(dict(peft_type="LORA", task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS,
                       base_model_name_or_path=base) | options, file)  # fmt: skip
    config.save_pretrained(merged)
    save_file(weights, merged + "/model.safetensors", metadata={"format": "pt"})
    load = AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        before, wanted = load(base)(tokens).logits, load(merged)(tokens).logits
        seen = PeftModel.from_pretrained(load(base), adapter).eval()(tokens).logits
    error = float((seen - wanted).abs().mean() / (wanted - before).abs().mean())
    print(f"{name}: error {error:.0%} of what the adapter changes")
    assert error < 1e-3 if right else error > 0.05, "the behaviour has changed"
PY
