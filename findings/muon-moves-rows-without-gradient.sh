#!/bin/sh
# Question: a neuron becomes inactive, so its row of a weight matrix no longer has a gradient. For how long does
#   torch.optim.Muon continue to move the row?
# Guess: as long as its momentum of 0.95 lasts, like SGD's: 8% of an update is left after 50 steps.
# Seen (torch 2.13.0): after 50 steps, the row still moves by 1.2 of its former update, and after 100 steps by 0.3. After
#   50 steps, AdamW's update is at 2% and SGD's at 7%. Muon's momentum shrinks too, but orthogonalising scales every
#   direction of a matrix to the same length, and the row is a direction of its own.
# Hurts: neurons, experts or vocabulary rows that are active only now and then, and anyone who makes activations sparse.
#   An inactive neuron keeps moving in the direction that made it inactive, and becomes active again less often. Let
#   AdamW train such matrices.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch

SILENT_FROM, SHOWN = 60, (0, 10, 25, 50, 75, 100, 150)
optimizers = {
    "SGD": lambda w: torch.optim.SGD([w], lr=1e-2, momentum=0.95, nesterov=True),
    "AdamW": lambda w: torch.optim.AdamW([w], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    "Muon": lambda w: torch.optim.Muon([w], lr=1e-2, momentum=0.95, weight_decay=0.0),
}
left = {}
for name, build in optimizers.items():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = build(weight)
    for step in range(SILENT_FROM + max(SHOWN) + 1):
        weight.grad = torch.randn(64, 128)
        if step > SILENT_FROM:
            weight.grad[0] = 0
        before = weight.detach().clone()
        optimizer.step()
        moved = (weight.detach() - before)[0].norm().item()
        first = moved if step == SILENT_FROM else first if step > SILENT_FROM else None
        if step - SILENT_FROM in SHOWN:
            left[name, step - SILENT_FROM] = moved / first
    print(name, *(f"{n} steps: {left[name, n]:.3f}" for n in SHOWN), sep="  ")
assert left["SGD", 50] < 0.08
assert left["AdamW", 50] < 0.05
assert left["Muon", 50] > 0.8, "the behaviour has changed"
assert left["Muon", 150] < 0.05
PY
