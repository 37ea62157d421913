#!/bin/sh
# Question: torch.optim.Adafactor trains bf16 weights. Adafactor divides a gradient by its own root mean square, so an
#   update does not depend on the gradient's scale. Is that so here?
# Guess: yes, in bf16 as in fp32.
# Seen (torch 2.13.0): in fp32, yes. In bf16, the divisor is at least 0.0078, because the first epsilon is by default
#   that of the weights' dtype. 50 steps with gradients of 1e-3 move the weights by 4% of what they do in fp32, and
#   gradients of 1e-5 by 0.01%. The page on Adafactor describes how epsilon is used, but not its value in bf16. With
#   eps=(1e-8, 1e-3), bf16 weights train as fp32 weights do.
# Hurts: training with bf16 weights, for which Adafactor is chosen to save memory. Gradients of language models are
#   smaller: a norm of 1 over 100 million weights is 1e-4 for each. The loss falls slowly, without an error.
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


def distance(dtype, scale, **options):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(64, 128, generator=generator) * 0.02).to(dtype))
    start = weight.detach().float().clone()
    optimizer = torch.optim.Adafactor([weight], lr=0.1, **options)
    for _ in range(50):
        weight.grad = (torch.randn(64, 128, generator=generator) * scale + scale).to(dtype)
        optimizer.step()
    return (weight.detach().float() - start).norm().item()


moved = {}
for dtype in (torch.float32, torch.bfloat16):
    for scale in (1e-2, 1e-3, 1e-5):
        moved[dtype, scale] = distance(dtype, scale)
        print(f"{dtype}, gradients of {scale:g}: the weights move by {moved[dtype, scale]:.4f}")
explicit = distance(torch.bfloat16, 1e-5, eps=(1e-8, 1e-3))
print(f"bf16, gradients of 1e-05, eps=(1e-8, 1e-3): by {explicit:.4f}")
full = moved[torch.float32, 1e-2]
assert abs(moved[torch.float32, 1e-5] / full - 1) < 0.05 and abs(explicit / full - 1) < 0.05
assert moved[torch.bfloat16, 1e-3] < 0.06 * full, "the behaviour has changed"
assert moved[torch.bfloat16, 1e-5] < 0.001 * full, "the behaviour has changed"
PY
