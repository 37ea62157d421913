#!/bin/sh
# Question: mergekit merges two fine-tuned models by "sce", which weights each by the squared size of its changes, and by
#   "model_stock", which goes so far from the base as the angle between the changes says. Both are ratios: if all changes
#   are made ten times smaller, is the merged change the same one, ten times smaller?
# Guess: yes, up to rounding, here in fp32.
# Seen (mergekit 0.1.5): no. Sums and products are compared with fixed numbers of 1e-6. sce: if the mean squares of all
#   changes sum to less than 1e-6, as with changes of 1e-4 and 4e-4 per weight, all models weigh the same; the second
#   model, which is to weigh 16 times as much as the first, loses that. model_stock: the product of two norms is at least
#   1e-6, so small changes look orthogonal, and the base is returned: with changes of 1e-5, 2.6% of the mean change is
#   kept instead of 67%. With filter_wise=True that is true of every row, and by default of norms. No message.
# Hurts: merges of models that were fine-tuned gently, by reinforcement learning or with small learning rates: the weighting
#   that the method is named for is off, or the merged model is the base, and it looks as if merging does not help.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 mergekit==0.1.5 transformers==5.24.0 numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import logging
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.disable(logging.WARNING)
sizes = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
names = ("model.layers.0.mlp.up_proj.weight", "model.norm.weight")


def merge(method, change, second=1, **parameters):
    """For a matrix and a norm: by how much each fine-tuned model's change is multiplied in the merged one."""
    root = f"{sys.argv[1]}/{method}-{change}-{second}-{len(parameters)}"
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**sizes))
    base.save_pretrained(root + "/base")
    shared = {name: torch.randn_like(weight) for name, weight in base.named_parameters()}
    for model_name, factor in (("first", 1), ("second", second)):
        model = LlamaForCausalLM.from_pretrained(root + "/base", dtype=torch.float32)
        with torch.no_grad():  # the cosine of the two changes is 1/2
            for name, weight in model.named_parameters():
                weight += change * factor * (shared[name] + torch.randn_like(weight)) / 2**0.5
        model.save_pretrained(f"{root}/{model_name}")
    recipe = {"merge_method": method, "base_model": root + "/base", "dtype": "float32", "parameters": parameters}
    recipe["models"] = [{"model": root + "/first"}, {"model": root + "/second"}]
    options = MergeOptions(copy_tokenizer=False, quiet=True, write_model_card=False)
    run_merge(MergeConfiguration.model_validate(recipe), root + "/merged", options)
    folders = ("base", "first", "second", "merged")
    files = {each: load_file(next(Path(root, each).glob("*.safetensors"))) for each in folders}
    shares = {}
    for name in names:
        first, second, merged = ((files[each][name] - files["base"][name]).double().flatten() for each in folders[1:])
        solution = torch.linalg.lstsq(torch.stack([first, second], 1), merged[:, None]).solution
        shares[name] = [round(share, 3) for share in solution.flatten().tolist()]
    print(f"{method} {parameters} changes of {change:g}: multiplied by {list(shares.values())}")
    return shares


print("mergekit", version("mergekit"), "torch", torch.__version__)
large, small = merge("sce", 1e-3, second=4), merge("sce", 1e-4, second=4)
for name in names:
    assert large[name][1] > 0.9 and small[name][1] < 0.75, "the behaviour has changed"
large, small = merge("model_stock", 1e-3, filter_wise=True), merge("model_stock", 1e-5, filter_wise=True)
for name in names:
    assert sum(large[name]) > 0.6 and sum(small[name]) < 0.1, "the behaviour has changed"
matrix, norm = merge("model_stock", 1e-5).values()
assert sum(matrix) > 0.6
assert sum(norm) < 0.1, "the behaviour has changed"
PY
