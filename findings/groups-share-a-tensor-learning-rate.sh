#!/bin/sh
# Question: an optimizer has two parameter groups and lr=torch.tensor(1.0), since a compiled step must not be compiled
#   again when the rate changes. LambdaLR gets one function per group: 1 for the first, 0.1 for the second. At which rates
#   do the groups train?
# Guess: at 1 and 0.1, as with lr=1.0. Schedulers support tensors: they write to them in place.
# Seen (torch 2.13.0): both at 0.1. Groups that take the default hold one and the same tensor, and what a scheduler writes
#   for the last group counts for all. OneCycleLR(max_lr=[1.0, 0.1]) does the same. ReduceLROnPlateau(factor=0.1) reads and
#   writes the tensor once per group, and so divides the rate by 100, or by 1,000 for three groups. There is no message, and
#   get_last_lr() shows the same rates. load_state_dict keeps it so. A tensor in each group, {"params": …, "lr":
#   torch.tensor(1.0)}, is right.
# Hurts: runs with rates per group (embeddings, biases, layer-wise decay) after the change to a tensor, which torch's
#   recipe for compiled optimizers advises.
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
from torch.optim import lr_scheduler


def rates(kind, make_scheduler, num_groups=2, plateau=False):
    """Rates of each group after two steps, the learning rate being a float or a tensor, shared or one for each group."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(num_groups)]
    if kind == "tensors":
        groups = [group | {"lr": torch.tensor(1.0)} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=1.0 if kind == "float" else torch.tensor(1.0))
    scheduler = make_scheduler(optimizer)
    for _ in range(2):
        optimizer.step()
        scheduler.step(1.0) if plateau else scheduler.step()
    return [round(float(group["lr"]), 6) for group in optimizer.param_groups]


cases = {
    "LambdaLR": (lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.1]), 2, False),
    "OneCycleLR": (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [1.0, 0.1], total_steps=10), 2, False),
    "ReduceLROnPlateau, two groups": (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), 2, True),
    "ReduceLROnPlateau, three groups": (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), 3, True),
}
seen = {}
for name, arguments in cases.items():
    for kind in ("float", "tensors", "tensor"):
        seen[name, kind] = rates(kind, *arguments)
    print(f"{name}: lr=1.0 {seen[name, 'float']}, a tensor per group {seen[name, 'tensors']}, "
          f"one tensor {seen[name, 'tensor']}")
    assert seen[name, "float"] == seen[name, "tensors"]
assert seen["LambdaLR", "float"] == [1.0, 0.1]
assert seen["LambdaLR", "tensor"] == [0.1, 0.1], "the behaviour has changed"
assert seen["OneCycleLR", "float"] == [1.0, 0.1] and seen["OneCycleLR", "tensor"] == [0.1, 0.1]
assert seen["ReduceLROnPlateau, two groups", "float"] == [0.1, 0.1]
assert seen["ReduceLROnPlateau, two groups", "tensor"] == [0.01, 0.01], "the behaviour has changed"
assert seen["ReduceLROnPlateau, three groups", "tensor"] == [0.001] * 3, "the behaviour has changed"
PY
