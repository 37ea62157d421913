#!/bin/sh
# Question: weights are quantised to 8 bits by bitsandbytes on the CPU, quantize_blockwise, and one of them is NaN. What
#   does dequantize_blockwise return? And what do zeros become, of a matrix that is half zeros?
# Guess: the block is NaN, or all is. Zeros stay zero: the code has a 0.
# Seen (bitsandbytes 0.50.2, torch 2.13.0, CPU): NaN becomes -0.99 times the block's maximum, one of the largest weights,
#   and the rest of the block is as without it. quantize_4bit (NF4) gives a block of NaN. No zero stays zero: each becomes
#   2e-5 of its block's maximum, though the code has a 0, so a matrix of 50% zeros has none left. The error of the
#   other weights is as small as it can be with this code, 1.2%.
# Hurts: checks for NaN after quantisation, which find none; and sparse weights or activations, whose zeros are counted, or
#   used to skip work, after a round trip through 8 bits.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6
fi
CUDA_VISIBLE_DEVICES= "$PYTHON" - <<'PY'
import torch
from bitsandbytes import functional

torch.manual_seed(0)
block = 4096
weight = 0.02 * torch.randn(64, block)
weight[torch.rand_like(weight) < 0.5] = 0


def round_trip(weight):
    return functional.dequantize_blockwise(*functional.quantize_blockwise(weight, blocksize=block))


restored = round_trip(weight)
code = functional.quantize_blockwise(weight)[1].code
maxima = weight.abs().amax(1, keepdim=True)
nearest = code[torch.searchsorted((code[1:] + code[:-1]) / 2, weight / maxima)] * maxima
zeros = weight == 0
errors = [((matrix - weight)[~zeros].norm() / weight.norm()).item() for matrix in (restored, nearest)]
left = (restored[zeros] == 0).float().mean().item()
size = (restored / maxima)[zeros].abs().max().item()
print(f"zero in the code: {(code == 0).any().item()}; zeros left: {left:.1%}, the others are {size:.1e} of the maximum")
print(f"error of the other weights: {errors[0]:.2%}, with the nearest value of the code {errors[1]:.2%}")

broken = weight.clone()
broken[0, 0] = torch.nan
after = round_trip(broken)
share = (after[0, 0] / broken[0, 1:].abs().max()).item()
same = torch.equal(after[0, 1:], restored[0, 1:])
print(f"NaN becomes {after[0, 0]:.4f}, {share:.3f} of the maximum; NaN left: {after.isnan().sum()}; "
      f"others the same: {same}")
four_bits = functional.dequantize_4bit(*functional.quantize_4bit(broken, blocksize=64, quant_type="nf4"))
print(f"NF4: {four_bits.isnan().sum()} NaN")
assert (code == 0).any() and abs(errors[0] / errors[1] - 1) < 0.01 and four_bits.isnan().sum() == 64
assert left == 0 and 1e-5 < size < 3e-5, "the behaviour has changed"
assert not after.isnan().any() and share < -0.95, "the behaviour has changed"
PY
