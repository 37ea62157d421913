#!/bin/sh
# Question: a bf16 LayerNorm is applied to 65,536 tokens on the CPU, and each has a gradient of 1. What is the gradient
#   of its bias? And that of a token's embedding that occurs 65,536 times?
# Guess: 65,536, as for the bias of a linear layer: sums are made in fp32 and rounded once.
# Seen (torch 2.13.0, CPU): 256 and 256. LayerNorm's backward pass adds the tokens' gradients in bf16, in one sum per
#   thread, and such a sum stops at 256 times a gradient; with two threads it is 512. Linear layers, GroupNorm and
#   RMSNorm give 65,536. Noise does not help: of gradients with mean 0.1 and noise of 0.5, nine tenths are lost below.
#   Weights of LayerNorm, and gradients of F.embedding_bag and index_select, are lost in the same way.
# Hurts: training in pure bf16 on the CPU, and tests on the CPU of what a GPU will do: norms and frequent tokens learn too
#   slowly, more so with larger batches and fewer threads. Autocast with fp32 weights is right.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
OMP_NUM_THREADS=1 "$PYTHON" - <<'PY'
import torch
from torch import nn

tokens, size = 65_536, 64


def bias_gradient(kind, dtype, gradient):
    module = kind.to(dtype)
    torch.manual_seed(0)
    module(torch.randn(tokens, size).to(dtype)).backward(gradient.to(dtype))
    return module.bias.grad.float()


def embedding_gradient(dtype):
    embedding = nn.Embedding(2, size).to(dtype)
    embedding(torch.zeros(tokens, dtype=torch.long)).sum().backward()
    return embedding.weight.grad[0, 0].item()


ones = torch.ones(tokens, size)
seen = {}
for dtype in (torch.float32, torch.bfloat16):
    for kind in (nn.Linear(size, size), nn.GroupNorm(1, size), nn.LayerNorm(size)):
        seen[type(kind).__name__, dtype] = bias_gradient(kind, dtype, ones)[0].item()
    seen["Embedding", dtype] = embedding_gradient(dtype)
for (name, dtype), value in seen.items():
    print(f"{name} in {dtype}: {value}")
noisy = 0.1 + 0.5 * torch.randn(tokens, size, generator=torch.Generator().manual_seed(1))
dtypes = torch.float32, torch.bfloat16
means = {dtype: bias_gradient(nn.LayerNorm(size), dtype, noisy).mean().item() for dtype in dtypes}
print("gradients of mean 0.1 with noise of 0.5, LayerNorm's bias:", means)
assert seen["Linear", torch.bfloat16] == seen["LayerNorm", torch.float32] == seen["Embedding", torch.float32] == tokens
assert seen["LayerNorm", torch.bfloat16] < 0.1 * tokens, "the behaviour has changed"
assert seen["Embedding", torch.bfloat16] == 256, "the behaviour has changed"
PY
