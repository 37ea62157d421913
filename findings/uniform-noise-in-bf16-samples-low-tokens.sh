#!/bin/sh
# Question: a token is sampled by the Gumbel trick: the argmax of logits - log(-log(u)), with u =
#   torch.rand_like(logits). The logits are bf16 and all equal. Which of 50,304 tokens are sampled?
# Guess: all of them, about equally often. Floating-point numbers are dense where u is small, and ties are rare.
# Seen (torch 2.13.0, CPU): half of the samples are among the first 200 tokens. The largest u below 1 is 0.996 in bf16,
#   so the noise ends at 5.5. Hundreds of tokens have it, and argmax takes the first. And u is 0 in 0.2% of cases, where
#   the noise is -inf: of 64 experts, the first is chosen a quarter more often than the last. u < 0.001 holds in 0.3% of
#   cases. In fp16, half of the samples are below 1,400. exponential_(), F.gumbel_softmax and F.dropout are right.
# Hurts: own samplers, routers with noise and random masks in bf16: text is made of the tokens with low numbers, and
#   small probabilities are wrong by factors. Draw the noise in fp32.
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
from torch.nn import functional as F


def by_uniform(logits):
    return (logits - torch.log(-torch.log(torch.rand_like(logits)))).argmax(dim=-1)


def by_exponential(logits):
    return (logits - torch.log(torch.empty_like(logits).exponential_())).argmax(dim=-1)


torch.manual_seed(0)
medians, ratios, rare = {}, {}, {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    tokens = torch.zeros(400, 50304, dtype=dtype)
    medians[dtype] = [sample(tokens).median().item() for sample in (by_uniform, by_exponential)]
    counts = torch.bincount(by_uniform(torch.zeros(200_000, 64, dtype=dtype)), minlength=64)
    ratios[dtype] = (counts[0] / counts[-1]).item()
    uniform = torch.rand(4_000_000, dtype=dtype)
    rare[dtype] = (uniform < 0.001).float().mean().item()
    dropped = (F.dropout(torch.ones(4_000_000, dtype=dtype), 0.001) == 0).float().mean().item()
    print(
        f"{dtype}: median token {medians[dtype][0]:,} (by exponential_() {medians[dtype][1]:,}); the first of 64 experts "
        f"is chosen {ratios[dtype]:.2f} times as often as the last; u < 0.001 in {rare[dtype]:.2%} and u = 0 in "
        f"{(uniform == 0).float().mean():.2%} of cases, F.dropout(0.001) drops {dropped:.2%}"
    )
    assert abs(dropped - 0.001) < 1e-4 and abs(medians[dtype][1] - 25_152) < 5000
assert abs(medians[torch.float32][0] - 25_152) < 5000 and abs(ratios[torch.float32] - 1) < 0.15
bf16 = torch.bfloat16
assert medians[bf16][0] < 1000 and ratios[bf16] > 1.2 and rare[bf16] > 0.002, "the behaviour has changed"
PY
