#!/bin/sh
# Question: a model is trained from scratch with the config of a published bf16 checkpoint. In which dtype are the
#   weights that AutoModelForCausalLM.from_config(config) makes?
# Guess: fp32, like those of LlamaForCausalLM(config). The config's dtype says how the checkpoint was saved.
# Seen (transformers 5.23.0): bf16. from_config follows config.dtype, the model's own class does not. At a learning rate
#   of 3e-5, the first step of AdamW then leaves 70% of the weights as they are, because the update is less than half the
#   distance to the next bf16 number; with fp32 weights it leaves 3%, which have no gradient.
#   from_config(config, dtype=torch.float32) gives fp32.
# Hurts: pretraining scripts that take the shape of a published model. Their weights are rounded to bf16 after every step,
#   without a message, and small updates are lost.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
published = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).bfloat16()
published.save_pretrained(f"{sys.argv[1]}/published")


def config():
    return AutoConfig.from_pretrained(f"{sys.argv[1]}/published")


def share_unchanged(model):
    """Of the weights, the share that one step of AdamW leaves as they are."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0)
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    ids = torch.randint(0, 512, (8, 128))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return (before == after).float().mean().item()


torch.manual_seed(0)
seen = {}
for name, model in {
    "LlamaForCausalLM(config)": LlamaForCausalLM(config()),
    "from_config(config, dtype=torch.float32)": AutoModelForCausalLM.from_config(config(), dtype=torch.float32),
    "from_config(config)": AutoModelForCausalLM.from_config(config()),
}.items():
    seen[name] = model.dtype, share_unchanged(model)
    print(f"{name}: {model.dtype}, {100 * seen[name][1]:.1f}% of the weights unchanged by a step")
assert [dtype for dtype, _ in seen.values()] == [torch.float32, torch.float32, torch.bfloat16], "it has changed"
assert seen["from_config(config)"][1] > 5 * seen["LlamaForCausalLM(config)"][1]
PY
