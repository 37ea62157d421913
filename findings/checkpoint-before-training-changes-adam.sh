#!/bin/sh
# Question: a run saves a checkpoint before its first step, with get_state_dict or get_optimizer_state_dict of
#   torch.distributed.checkpoint. Does it train as it would without that checkpoint?
# Guess: yes, to the last bit. Reading a state changes nothing.
# Seen (torch 2.13.0): no. These functions make the optimizer's state by a step with gradients of zero and a learning
#   rate of 0, and leave it so: Adam's `step` is 1. Its bias correction is then one step ahead, and the first update of
#   AdamW is 0.74 of what it is without the checkpoint. SGD's momentum begins with the weight decay (here, an update that
#   is 1.16 times as long). Muon is not affected. After the first step, the functions only read.
# Hurts: comparisons of runs that save at step 0 with runs that do not, and tests that expect equal bits.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

optimizers = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0),
    "SGD with weight decay": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, weight_decay=0.1),
    "Muon": lambda weights: torch.optim.Muon(weights, lr=0.01),
}


def first_update(optimizer, save_before):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, bias=False)
    before = layer.weight.detach().clone()
    optimizer = optimizers[optimizer](layer.parameters())
    if save_before:
        get_optimizer_state_dict(layer, optimizer)
        assert torch.equal(layer.weight, before)
    layer(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return (layer.weight - before).norm().item()


ratios = {}
for name in optimizers:
    ratios[name] = first_update(name, True) / first_update(name, False)
    print(f"{name}: the first update after a checkpoint is {ratios[name]:.3f} of the one without")
assert ratios["Muon"] == 1
assert abs(ratios["AdamW"] - 0.744) < 0.002 and abs(ratios["SGD with weight decay"] - 1) > 0.02, "the behaviour has changed"
PY
