#!/bin/sh
# Question: a folder holds a model as one model.safetensors. Other weights are saved over it with
#   save_pretrained(folder, max_shard_size=…), which makes several shards now. What does from_pretrained(folder) load?
# Guess: the new weights. save_pretrained removes the files that it replaces, as it does with shards.
# Seen (transformers 5.23.0, accelerate 1.15.0): the old ones, without a message. save_pretrained and accelerate's
#   save_model remove old shards, but not an old model.safetensors, and from_pretrained prefers that file to the index
#   of the shards. huggingface_hub's save_torch_state_dict removes it.
# Hurts: folders that are written again and again, such as "latest" or "best", once the model is larger than a shard:
#   another dtype, an expanded model, or another tool. The limit is 50 GB in transformers and 10 GB in accelerate.
#   Whatever is evaluated or served afterwards is the old model.
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
from accelerate import Accelerator
from huggingface_hub import save_torch_state_dict
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


def model(seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def loaded(name, save):
    """Which weights from_pretrained reads after `save` has written the new ones over the old."""
    folder = f"{sys.argv[1]}/{name}"
    old.save_pretrained(folder)
    save(folder)
    weight = LlamaForCausalLM.from_pretrained(folder).lm_head.weight
    result = "old" if torch.equal(weight, old.lm_head.weight) else "new" if torch.equal(weight, new.lm_head.weight) else "?"
    print(f"{name}: from_pretrained loads the {result} weights")
    return result


old, new = model(0), model(1)
seen = [
    loaded("save_pretrained, one file", lambda folder: new.save_pretrained(folder)),
    loaded(
        "save_torch_state_dict, shards",
        lambda folder: save_torch_state_dict(new.state_dict(), folder, max_shard_size="200KB"),
    ),
    loaded("save_pretrained, shards", lambda folder: new.save_pretrained(folder, max_shard_size="200KB")),
    loaded("save_model, shards", lambda folder: Accelerator(cpu=True).save_model(new, folder, max_shard_size="200KB")),
]
assert seen[:2] == ["new", "new"]
assert seen[2:] == ["old", "old"], "the behaviour has changed"
PY
