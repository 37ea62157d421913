#!/bin/sh
# Question: torch.optim.SGD(model.parameters(), lr=…, fused=True) trains a bf16 model on the CPU. Does it do what it does
#   without fused=True, up to rounding?
# Guess: yes. Fused AdamW differs in bf16, but only by where it rounds.
# Seen (torch 2.13.0, CPU): without momentum, no weight moves but the last few of each tensor. The kernel computes whole
#   vectors of weights, of 16 here, without writing them back; only what is left over, size % 16 weights, is updated. A
#   matrix whose size is a multiple of 16 never changes. With momentum the same weights stay as well, and from the second
#   step on the momentum is garbage. fp16 is the same; fp32 is right, and so is fused AdamW. There is no message.
#   torch 2.14.0 is right.
# Hurts: tests and small experiments on CPUs in bf16: biases and norms of odd sizes train, so the loss falls a little. And
#   checkpoints whose momentum is used elsewhere.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import torch


def train(size, dtype, steps, fused, momentum=0.0, optimizer=torch.optim.SGD):
    """The weights and the momentum after some steps with random gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(size, generator=generator).to(dtype).requires_grad_()
    start = weights.detach().clone()
    options = {"momentum": momentum} if optimizer is torch.optim.SGD else {}
    optimizer = optimizer([weights], lr=0.5, fused=fused, **options)
    for _ in range(steps):
        weights.grad = torch.randn(size, generator=generator).to(dtype)
        optimizer.step()
    return weights.detach() != start, weights.detach().float(), optimizer.state[weights].get("momentum_buffer")


moved = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for size in (15, 4096, 4096 + 7):
        for fused in (False, True):
            changed, *_ = train(size, dtype, 1, fused)
            moved[dtype, size, fused] = int(changed.sum())
        print(f"{dtype}, {size} weights: {moved[dtype, size, False]} move, {moved[dtype, size, True]} with fused=True")
_, plain, buffer = train(4096, torch.bfloat16, 3, fused=False, momentum=0.9)
changed, fused, fused_buffer = train(4096, torch.bfloat16, 3, fused=True, momentum=0.9)
off = ((fused_buffer.float() - buffer.float()).norm() / buffer.float().norm()).item()
print(f"bf16 with momentum, 3 steps: {int(changed.sum())} of 4096 weights move; the momentum is {off:.0%} off")
_, one, _ = train(4096, torch.bfloat16, 3, fused=False, optimizer=torch.optim.AdamW)
_, two, _ = train(4096, torch.bfloat16, 3, fused=True, optimizer=torch.optim.AdamW)
adam = ((one - two).norm() / one.norm()).item()
print(f"bf16, AdamW: fused and not fused differ by {adam:.2%}")
assert adam < 0.02
assert all(moved[torch.float32, size, True] == moved[torch.float32, size, False] for size in (15, 4096, 4103))
for dtype in (torch.bfloat16, torch.float16):
    assert moved[dtype, 4096, False] > 4000
    assert moved[dtype, 15, True] == moved[dtype, 15, False]
    assert moved[dtype, 4096, True] == 0 and moved[dtype, 4103, True] <= 7, "the behaviour has changed"
assert not changed.any() and off > 0.3, "the behaviour has changed"
PY
