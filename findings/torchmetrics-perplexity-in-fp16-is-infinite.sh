#!/bin/sh
# Question: torchmetrics' Perplexity gets the logits of a model in fp16. The loss, F.cross_entropy of the same logits, is
#   1.5. What is the perplexity?
# Guess: exp(1.5), up to 1%.
# Seen (torchmetrics 1.9.0, torch 2.13.0, CPU): infinity. Perplexity takes the softmax first and its logarithm after it,
#   in the dtype of the logits: in fp16, a probability below 3e-8 is zero, and one such token in all updates is enough.
#   Below, 4 of 2,048 tokens have a loss over 17. In bf16 the value is 0.3% off, in fp32 it is right. The documentation
#   does not mention dtypes.
# Hurts: evaluations in fp16: a good model that is sure of itself seems to be broken, and a worse one does not. Where the
#   sum of several updates is infinite, nothing says which text it was. Convert logits to fp32 first.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import math

import torch
import torch.nn.functional as F
from torchmetrics.text import Perplexity

torch.manual_seed(0)
vocabulary, length = 50_304, 2048
targets = torch.randint(vocabulary, (1, length))
logits = 1.5 * torch.randn(1, length, vocabulary)
# The model is sure of one token, and right in 9 of 10 cases.
right = torch.rand(1, length) < 0.9
favourites = torch.where(right, targets, torch.randint(vocabulary, (1, length)))
logits.scatter_(2, favourites[..., None], 14.0)
seen = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    rounded = logits.to(dtype)
    losses = F.cross_entropy(rounded[0].float(), targets[0], reduction="none")
    metric = Perplexity()
    metric.update(rounded, targets)
    seen[dtype] = value, true = metric.compute().item(), losses.mean().exp().item()
    over = (losses > 17).sum().item()
    print(f"{dtype}: perplexity {value:.4f}, exp(cross_entropy) {true:.4f}; {over} losses over 17, "
          f"at most {losses.max():.1f}")
assert abs(seen[torch.float32][0] / seen[torch.float32][1] - 1) < 1e-3
assert seen[torch.float16][1] < 5 and math.isinf(seen[torch.float16][0]), "the behaviour has changed"
PY
