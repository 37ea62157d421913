#!/bin/sh
# Question: LoRA on a base model in 4 bits (bitsandbytes) trains on a CPU. The model is evaluated, and goes back to train().
#   Are the gradients of the next step right?
# Guess: yes, as on a GPU.
# Seen (bitsandbytes 0.50.2, x86 CPU with AVX512-BF16): no. The first forward in eval() puts the weights into another
#   layout. train() does not put them back, and the product in that layout has no backward; so no gradient passes through
#   any base layer. Those of the last layer's adapter stay right; those before it get only what comes through the adapters
#   above them, a third of the norm here, and nothing where these begin at zero. The outputs are right. torch warns once
#   that an operator has no backward. state_dict() puts the weights back, and the gradients with them. PEFT's adapters
#   behave alike.
# Hurts: every run with evaluations, from the first one until the next save of the base: the adapters train on wrong
#   gradients.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6
fi
CUDA_VISIBLE_DEVICES= "$PYTHON" - <<'PY'
import sys

import bitsandbytes
import torch
from torch import nn

if not bitsandbytes.functional.has_avx512bf16():
    sys.exit("needs a CPU with AVX512-BF16")
torch.manual_seed(0)


class Adapted(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        self.base = bitsandbytes.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16)
        self.base.load_state_dict({"weight": weight})
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(8, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.randn(outputs, 8) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


model = nn.Sequential(Adapted(256, 512), nn.ReLU(), Adapted(512, 256)).to("cpu")
tokens, targets = torch.randn(2, 64, 256)


def step():
    model.train()
    model.zero_grad()
    loss = nn.functional.mse_loss(model(tokens), targets)
    loss.backward()
    return loss.item(), [model[layer].up.grad.clone() for layer in (0, 2)]


def show(when):
    loss, gradients = step()
    errors = [float((gradient - right).norm() / right.norm()) for gradient, right in zip(gradients, first)]
    sizes = [float(gradient.norm() / right.norm()) for gradient, right in zip(gradients, first)]
    print(f"{when}: loss {loss:.4f}; norm of the gradients of the first and the last layer: "
          f"{sizes[0]:.2f} and {sizes[1]:.2f} of what they were; {errors[0]:.0%} and {errors[1]:.0%} off")
    return errors


_, first = step()
assert max(show("again")) < 0.01
model.eval()
with torch.no_grad():
    model(tokens)
seen = show("after an evaluation")
assert seen[1] < 0.03 and seen[0] > 0.5, "the behaviour has changed"
model.state_dict()
assert max(show("after state_dict()")) < 0.03
PY
