#!/bin/sh
# Question: an optimizer is made with torch.optim.AdamW(model.named_parameters()), so that its state_dict has the names of
#   its parameters. The code of the model changes, and defines q_proj before k_proj instead of after it. Whose moments does
#   each of the two have after optimizer.load_state_dict?
# Guess: its own. The state has the names, the new optimizer has the names, so they are matched, or there is an error. The
#   model itself loads by name and is right.
# Seen (torch 2.13.0): the other's. States are matched by position, with or without names, and only the number of parameters
#   is compared. The names are replaced as well: the new optimizer says k_proj of the moments that q_proj has, and writes
#   that into its next checkpoint, where whoever matches by name gets it wrong for good. The documentation says that names
#   do not affect loading. There is no message. torch.distributed.checkpoint.state_dict.set_optimizer_state_dict matches
#   by name.
# Hurts: resumed runs after a change of the model's code, of the order of the groups or of the filter that makes them:
#   matrices of one shape, such as q, k, v and o, or gate and up, get each other's moments. Here k_proj has the smaller
#   gradients; 100 steps after the run was resumed, it still moves about 700 times too slowly.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

SCALES = {"k_proj": 1e-3, "q_proj": 1.0}  # of the gradients


def make(names):
    model = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in names})
    return model, torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0)


def train(model, optimizer):
    """How far the last of 100 steps moves each matrix, on average, in units of the learning rate."""
    for _ in range(100):
        before = copy.deepcopy(model.state_dict())
        for name, scale in SCALES.items():
            model[name].weight.grad = torch.full((16, 16), scale)
        optimizer.step()
    return {name: (model[name].weight - before[f"{name}.weight"]).abs().mean().item() / 1e-2 for name in SCALES}


model, optimizer = make(["k_proj", "q_proj"])
train(model, optimizer)
state, by_name = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(get_optimizer_state_dict(model, optimizer))
weights = copy.deepcopy(model.state_dict())
seen = {"uninterrupted": train(model, optimizer)}
resumed, optimizer = make(["q_proj", "k_proj"])
resumed.load_state_dict(weights)
optimizer.load_state_dict(state)
actual = [name for name, _ in resumed.named_parameters()]
names = optimizer.state_dict()["param_groups"][0]["param_names"]
print("the parameters are", actual, "and the optimizer's names", names)
seen["load_state_dict"] = train(resumed, optimizer)
resumed, optimizer = make(["q_proj", "k_proj"])
resumed.load_state_dict(weights)
set_optimizer_state_dict(resumed, optimizer, by_name)
seen["set_optimizer_state_dict"] = train(resumed, optimizer)
for name, moved in seen.items():
    sizes = ", ".join(f"{matrix} by {size:.3g}" for matrix, size in moved.items())
    print(f"{name}: 100 steps later, a step moves {sizes}")
for name in ("uninterrupted", "set_optimizer_state_dict"):
    assert all(abs(size - 1) < 0.01 for size in seen[name].values())
assert names == actual[::-1], "the behaviour has changed"
wrong = seen["load_state_dict"]
assert wrong["k_proj"] < 0.01, "the behaviour has changed"
PY
