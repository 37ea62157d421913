#!/bin/sh
# Question: torch.autograd.graph.saved_tensors_hooks counts the bytes that a step keeps for the backward pass: its pack hook
#   adds up sizes and returns the tensor itself. The model changes an activation in place after it was used. What happens?
# Guess: the same as without hooks, which change nothing: RuntimeError, "modified by an inplace operation".
# Seen (torch 2.13.0): no error, and a wrong gradient. With any hooks, PyTorch leaves out its check that a saved tensor has
#   not changed, even if they return the tensor itself, or keep it beside a note of its device. Hooks that copy (to CPU
#   memory, to another dtype) give the right gradient.
# Hurts: memory counters and profilers, and offloading or compression that leaves small tensors where they are. Under them,
#   a model with such a bug trains on wrong gradients; without them, it stops at once with a clear message.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
from contextlib import nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks

torch.manual_seed(0)
x, w_gate, w_up = torch.randn(4, 8), torch.randn(8, 16), torch.randn(8, 16)
saved = []


def gradient(context, changes_in_place):
    weights = [w_gate.clone().requires_grad_(), w_up.clone().requires_grad_()]
    with context:
        gate = (x @ weights[0]).sigmoid()
        loss = (gate * (x @ weights[1])).square().sum()
        if changes_in_place:
            gate.detach().mul_(gate > 0.5)  # as for statistics of the gates that are open
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in weights])


def count(tensor):
    saved.append(tensor.nbytes)
    return tensor


CONTEXTS = {
    "no hooks": nullcontext(),
    "hooks that return the tensor": saved_tensors_hooks(count, lambda tensor: tensor),
    "hooks that keep it with its device": saved_tensors_hooks(lambda t: (t.device, t), lambda packed: packed[1]),
    "hooks that copy it": saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor),
}
right = gradient(nullcontext(), changes_in_place=False)
for name, context in CONTEXTS.items():
    try:
        found = gradient(context, changes_in_place=True)
    except RuntimeError as error:
        assert name == "no hooks" and "inplace" in str(error), "the behaviour has changed"
        print(f"{name}: RuntimeError")
        continue
    off = ((found - right).norm() / right.norm()).item()
    print(f"{name}: no error; the gradient is {off:.1%} off")
    assert name != "no hooks" and (off == 0 if "copy" in name else off > 0.1), "the behaviour has changed"
print(f"counted {len(saved)} saved tensors, {sum(saved)} bytes")
PY
"$PYTHON" "$dir/check.py"
