#!/bin/sh
# Question: a residual is added in place to save memory: x += checkpoint(ffn, hidden=x, use_reentrant=False). What is the
#   gradient?
# Guess: an error, "modified by an inplace operation", or the right gradient. Activation checkpointing changes memory and
#   time only, and without it this code raises.
# Seen (torch 2.13.0): without a message, a wrong gradient. checkpoint keeps the tensors for its second forward pass. It
#   checks that they have not changed only if they are positional arguments: then it raises. Keyword arguments, tensors in
#   a tuple, and those that a lambda or functools.partial holds are read as they are at the time of the backward pass,
#   after the addition.
# Hurts: models with residuals, masks, routing weights or buffers that are changed in place: their gradients differ from
#   those without checkpointing, and nothing tells so.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
x_BK = torch.randn(3, 8)
layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
keep = functools.partial(checkpoint, use_reentrant=False)


def ffn(hidden):
    return layers(hidden)


WAYS = {
    "no checkpoint": ffn,
    "positional": lambda x: keep(ffn, x),
    "keyword": lambda x: keep(ffn, hidden=x),
    "in a tuple": lambda x: keep(lambda pair: ffn(pair[0]), (x, None)),
    "lambda": lambda x: keep(lambda: ffn(x)),
    "functools.partial": lambda x: keep(functools.partial(ffn, hidden=x)),
}


def gradient(block, in_place):
    layers.zero_grad()
    x = x_BK.clone().requires_grad_() * 1
    for _ in range(2):
        if in_place:
            x += block(x)
        else:
            x = x + block(x)
    x.square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in layers.parameters()])


right = gradient(ffn, in_place=False)
for name, block in WAYS.items():
    assert torch.allclose(gradient(block, in_place=False), right)
    try:
        off = ((gradient(block, in_place=True) - right).norm() / right.norm()).item()
        print(f"{name}: no error; the gradient is {off:.0%} off")
        assert name not in ("no checkpoint", "positional") and off > 0.1, "the behaviour has changed"
    except RuntimeError as error:
        print(f"{name}: RuntimeError")
        assert name in ("no checkpoint", "positional") and "inplace" in str(error), "the behaviour has changed"
PY
"$PYTHON" "$dir/check.py"
