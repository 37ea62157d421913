#!/bin/sh
# Question: peft's create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-4, loraplus_lr_ratio=16, weight_decay=0.1)
#   passes further arguments to the optimizer. Which weight decay do the adapter's matrices have?
# Guess: 0.1, all of them. Without the argument it would be AdamW's 0.01.
# Seen (peft 0.21.2): 0 in both cases. The groups that the function makes have a weight decay of their own, which overrides
#   the argument: 0, unless it is given as loraplus_weight_decay. There is no message. An adapter of the embedding has a
#   learning rate of its own too, 1e-6, whatever lr is: here a hundredth of that of the other A matrices.
# Hurts: comparisons of LoRA+ with LoRA under the same AdamW settings: one is regularised and the other is not. And
#   adapters with embedding layers, which hardly train.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2
fi
"$PYTHON" - <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn

config = LoraConfig(r=4, target_modules=["embedding", "up"])
model = get_peft_model(nn.ModuleDict({"embedding": nn.Embedding(64, 32), "up": nn.Linear(32, 64)}), config)
names = {id(parameter): name for name, parameter in model.named_parameters()}
seen = {}
for options in ({"weight_decay": 0.1}, {}, {"loraplus_weight_decay": 0.1}):
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-4, loraplus_lr_ratio=16, **options)
    seen[str(options)] = {
        names[id(parameter)].removeprefix("base_model.model."): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    print(f"options {options or 'none'}:")
    for name, (rate, decay) in seen[str(options)].items():
        print(f"    {name}: learning rate {rate:g}, weight decay {decay:g}")
for options in ({"weight_decay": 0.1}, {}):
    assert all(decay == 0 for _, decay in seen[str(options)].values()), "the behaviour has changed"
assert any(decay == 0.1 for _, decay in seen[str({"loraplus_weight_decay": 0.1})].values())
rates = {name: rate for name, (rate, _) in seen["{}"].items()}
assert rates["up.lora_A.default.weight"] == 1e-4
assert rates["embedding.lora_embedding_A.default"] == 1e-6, "the behaviour has changed"
PY
