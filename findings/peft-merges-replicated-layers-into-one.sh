#!/bin/sh
# Question: a model is made deeper by LoRA's layer_replication=[[0, 2], [1, 2]]: the copies of a layer share its weights and
#   have each an adapter of their own. After training, model.merge_and_unload(). Is the merged model the trained one?
# Guess: yes, each copy with its own weights; or it is refused, since shared weights cannot hold two updates. The adapter is
#   saved and loaded rightly.
# Seen (peft 0.21.2, transformers 5.24.0, CPU): neither. The copies stay shared, and the update of each copy is added to the
#   one weight: the original layer and its copy both run with the sum. The outputs are off by half of what the adapter
#   changes. merge_adapter() does the same. The merge says nothing; only saving the result fails, on shared tensors.
#   Without replication, the merge is right.
# Hurts: whoever evaluates or serves the merged model in memory: it is another model than the trained one.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import copy
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
tokens = torch.randint(3, 64, (2, 16))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4))  # fmt: skip
with torch.no_grad():
    for weight in llama.parameters():
        weight.normal_(0, 0.2) if weight.dim() > 1 else None
for replication in (None, [[0, 2], [1, 2]]):
    for how in ("merge_and_unload", "merge_adapter"):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], layer_replication=replication)
        model = get_peft_model(copy.deepcopy(llama), config).eval()
        with torch.no_grad(), warnings.catch_warnings(record=True) as messages:
            before = model(tokens).logits  # of the model with the copied layers
            for weight in model.parameters():  # as if it had been trained
                weight.add_(0.2 * torch.randn_like(weight)) if weight.requires_grad else None
            wanted = model(tokens).logits
            warnings.simplefilter("always")
            merged = getattr(model, how)() or model
            seen = merged(tokens).logits
        layers = len(model.base_model.model.model.layers)
        error = float((seen - wanted).abs().mean() / (wanted - before).abs().mean())
        print(f"layer_replication={replication}, {layers} layers, {how}: error {error:.0%} of what the adapter changes; "
              f"messages: {len(messages)}")
        assert error < 1e-3 if replication is None else error > 0.2, "the behaviour has changed"
PY
