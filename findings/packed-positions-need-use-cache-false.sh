#!/bin/sh
# Question: documents are packed into one sequence, and position_ids begin at 0 for each document, without an
#   attention mask. transformers recognises this. Are the documents isolated from each other?
# Guess: yes, and in the same way when training and when evaluating.
# Seen (transformers 5.23.0, Llama, SDPA and eager): only with use_cache=False. The default, use_cache=True, makes an
#   empty key-value cache, and a cache turns the recognition off, in train() mode too. A mask of ones turns it off as
#   well. Each document then attends to those before it. There is no warning.
# Hurts: own training loops and evaluations on packed documents: the loss of a document depends on its neighbours.
#   transformers' Trainer sets use_cache=False, so its losses and those of an own loop differ for the same weights.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
ids = torch.randint(0, 64, (1, 16))
positions = torch.arange(8).repeat(2)[None]  # two documents of eight tokens
seen = {}
for training in (True, False):
    model.train(training)
    for name, options in {
        "default": {},
        "use_cache=False": {"use_cache": False},
        "use_cache=False, mask of ones": {"use_cache": False, "attention_mask": torch.ones_like(ids)},
    }.items():
        with torch.no_grad():
            packed = model(ids, position_ids=positions, **options).logits[:, 8:]
            alone = model(ids[:, 8:]).logits
        seen[training, name] = (packed - alone).abs().max().item() < 1e-5
        mode = "train()" if training else "eval()"
        print(f"{mode}, {name}: "
              f"the second document's logits are {'' if seen[training, name] else 'not '}those it has alone")
for (_, name), isolated in seen.items():
    assert isolated == (name == "use_cache=False"), "the behaviour has changed"
PY
