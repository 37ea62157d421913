#!/bin/sh
# Needs a GPU. PYTHON: a Python with torch for CUDA (seen with 2.11.0, CUDA 13.0, H200).
#
# Question: torch.use_deterministic_algorithms(True, warn_only=True) is the usual way to get deterministic algorithms
#   where they exist, and a warning elsewhere. Flash attention has a deterministic backward pass. Is it used?
# Guess: yes, without a warning.
# Seen: no. The gradient of the queries differs from call to call, as without the flag, for Flash, cuDNN and
#   memory-efficient attention. With warn_only=False, Flash's gradients are equal in every call.
# Hurts: anyone who compares runs bit for bit, or looks for the step at which two runs diverge.
set -eu
"${PYTHON:-python3}" - <<'PY'
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

warnings.simplefilter("ignore")
torch.manual_seed(0)
shape = (4, 16, 2048, 64)
q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
direction = torch.randn_like(q)


def gradient():
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.autograd.grad(y, q, direction)[0]


seen = {}
for name, setting in (("off", {"mode": False}), ("warn only", {"mode": True, "warn_only": True}), ("on", {"mode": True})):
    torch.use_deterministic_algorithms(**setting)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                first = gradient()
                equal = all(torch.equal(gradient(), first) for _ in range(20))
        except RuntimeError as error:
            equal = f"refused: {str(error).splitlines()[0][:70]}"
        seen[name, backend.name] = equal
        print(f"determinism {name}, {backend.name}: equal in 20 calls: {equal}")
assert seen["off", "FLASH_ATTENTION"] is False
assert seen["warn only", "FLASH_ATTENTION"] is False, "the behaviour has changed"
assert seen["on", "FLASH_ATTENTION"] is True
PY
