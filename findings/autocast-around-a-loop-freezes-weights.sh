#!/bin/sh
# Question: one torch.autocast block holds a whole training loop, forward, backward and optimizer step. Does the model
#   train?
# Guess: yes. Autocast casts a weight once and keeps the result until the weight changes.
# Seen (torch 2.13.0, CPU): no. The cast weights are kept until the outermost autocast block ends, however often the
#   optimizer changes the fp32 weights, and the loss is the same at every step. Blocks inside do not help. With a block
#   per step or cache_enabled=False, the loss falls. Compiled models keep no casts, and train.
# Hurts: scripts that open autocast once, for a loop or for the whole program. Gradient, norms and weights change
#   plausibly, since the optimizer goes on with the gradient of the first weights.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
from contextlib import nullcontext

import torch


def autocast(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


def losses(outer, inner):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(16, 16), torch.randn(64, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    seen = []
    with outer:
        for _ in range(10):
            with inner():
                loss = layer(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


seen = {
    "one block around the loop": losses(autocast(), nullcontext),
    "the same, and a block per step inside": losses(autocast(), autocast),
    "one block, cache_enabled=False": losses(autocast(cache_enabled=False), nullcontext),
    "a block per step": losses(nullcontext(), autocast),
}
for name, values in seen.items():
    print(f"{name}: loss {values[0]:.4f} at first, {values[-1]:.4f} after ten steps")
frozen = [len(set(values)) == 1 for values in seen.values()]
assert not any(frozen[2:]) and all(values[-1] < values[0] / 2 for values in list(seen.values())[2:])
assert all(frozen[:2]), "the behaviour has changed"
PY
