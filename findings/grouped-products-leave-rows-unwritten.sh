#!/bin/sh
# Needs a GPU. PYTHON: a Python with torch for CUDA (seen with 2.11.0, CUDA 13.0, H200).
#
# Question: what does torch.nn.functional.grouped_mm write to rows after the last offset, forward and backward? Buffers
#   of a fixed size for a varying number of routed tokens have such rows.
# Guess: zeros.
# Seen: nothing. The rows keep what the memory held before; here, NaN. The rows of the input's gradient are not written
#   either (we saw 4.75 where the memory had been used before; this depends on the allocator, so it is not asserted
#   below). A later sum over all rows includes them, although the loss never read them.
# Hurts: mixtures of experts with padded token buffers. Fresh memory is often zero, so small tests pass.
set -eu
"${PYTHON:-python3}" - <<'PY'
import torch
import torch.nn.functional as F

rows, used = 1024, 768
offsets = torch.tensor([256, 512, used], device="cuda", dtype=torch.int32)


def poison(*shape):
    """Memory that the next tensor of this shape will get."""
    torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)


torch.manual_seed(0)
x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w = torch.randn(3, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
poison(rows, 256)
y = F.grouped_mm(x, w, offs=offsets)
loss = y[:used].float().square().mean()
poison(rows, 512)
loss.backward()
for name, tensor in (("output", y), ("gradient of the input", x.grad)):
    print(f"{name}: NaN in {int(tensor[used:].isnan().any(1).sum())} of the {rows - used} rows after the last offset")
print(f"loss {loss.item():.3f}, weight gradient finite: {bool(w.grad.isfinite().all())}")
assert y[:used].isfinite().all() and x.grad[:used].isfinite().all() and w.grad.isfinite().all()
assert y[used:].isnan().all(), "the behaviour has changed"
PY
