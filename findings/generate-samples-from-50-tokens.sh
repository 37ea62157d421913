#!/bin/sh
# Question: a model's generation_config says nothing of top_k, and GenerationConfig().top_k is None in transformers 5. From
#   how many tokens does generate(do_sample=True) sample?
# Guess: from all. None of the settings restricts the distribution, and temperature is 1.
# Seen (transformers 5.23.0): from the 50 most likely. Inside generate, a top_k that is None becomes 50. Neither the model's
#   configuration nor a saved generation_config.json shows that number. GenerationConfig(do_sample=True, top_k=None), which
#   asks for None, is overwritten as well, while generate(top_k=None), the same setting as an argument, is not. top_k=0
#   turns it off everywhere. The documentation of top_k names the default of 50.
# Hurts: samples that should follow the model: estimates of likelihood and diversity, pass@k, rejection sampling, and
#   importance weights in reinforcement learning. Below, the 50 tokens have 14% of the probability.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - "$dir" <<'PY'
import json
import sys

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1)).eval()
model.generation_config.save_pretrained(sys.argv[1])
with open(f"{sys.argv[1]}/generation_config.json") as file:
    assert "top_k" not in json.load(file)
assert model.generation_config.top_k is None and GenerationConfig().top_k is None
prompt = torch.ones(5000, 1, dtype=torch.long)
with torch.no_grad():
    share = model(prompt[:1]).logits[0, -1].softmax(-1).topk(50).values.sum().item()
print(f"the 50 most likely tokens have {share:.1%} of the probability")
seen = {}
for name, options in {
    "no setting": {},
    "GenerationConfig(do_sample=True, top_k=None)": {"generation_config": GenerationConfig(do_sample=True, top_k=None)},
    "generate(top_k=None)": {"top_k": None},
    "generate(top_k=0)": {"top_k": 0},
}.items():
    tokens = model.generate(prompt, do_sample=True, max_new_tokens=1, pad_token_id=0, **options)[:, -1]
    seen[name] = tokens.unique().numel()
    print(f"{name}: {seen[name]} different tokens in 5,000 samples")
assert seen["generate(top_k=None)"] > 900 and seen["generate(top_k=0)"] > 900
assert seen["no setting"] == 50, "the behaviour has changed"
assert seen["GenerationConfig(do_sample=True, top_k=None)"] == 50, "the behaviour has changed"
PY
