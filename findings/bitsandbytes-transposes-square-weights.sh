#!/bin/sh
# Question: weights stored as (in, out), as GPT-2, JAX and tensors of experts do, are quantised with `quantize_4bit` and
#   used by `matmul_4bit(x, weight, state)`. Does an update from bitsandbytes 0.49.2 to 0.50.2 keep x @ weight?
# Guess: yes. The orientation is deprecated in 0.50, and a deprecated call still gives what it gave.
# Seen (bitsandbytes 0.49.2 and 0.50.2, on a CPU): a weight of 64 x 128 still does, with a DeprecationWarning. A square one
#   silently gives x @ weight.T, 1.4 times as far from x @ weight as that is long, and so do its gradients. 0.50 takes
#   the orientation from the shapes, which fit both ways. `weight` and `weight.t()` now give the same product; 0.49.2 told
#   them apart.
# Hurts: everyone with own 4-bit layers of such weights: after the update the FFN is right and warns, while square
#   projections of attention are transposed, so losses and texts are wrong. No shape and no error tells.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 packaging==26.3
fi
cat > "$dir/products.py" <<'PY'
import warnings

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

torch.manual_seed(0)
old = bitsandbytes.__version__.startswith("0.49")


def distance(product, expected):
    return float((product - expected).norm() / expected.norm())


for shape in ((64, 128), (64, 64)):
    packed, state = quantize_4bit(torch.randn(shape), quant_type="nf4", blocksize=64)
    weight = dequantize_4bit(packed, state)
    x = torch.randn(3, shape[0], requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        product = bitsandbytes.matmul_4bit(x, packed, state)
    product.sum().backward()
    deprecated = any(issubclass(warning.category, DeprecationWarning) for warning in caught)
    off, gradient_off = distance(product, x @ weight), distance(x.grad, weight.sum(1).expand(3, -1))
    print(
        f"bitsandbytes {bitsandbytes.__version__}, {shape}: {off:.2f} off x @ weight, gradient {gradient_off:.2f} off, "
        f"{'warns' if deprecated else 'no warning'}"
    )
    if old or shape == (64, 128):
        assert off < 1e-5 and gradient_off < 1e-5, "the behaviour has changed"
    else:
        assert off > 1 and gradient_off > 0.5 and not deprecated, "the behaviour has changed"
        assert distance(product, x @ weight.T) < 1e-5, "the behaviour has changed"
PY
for version in 0.49.2 0.50.2; do
  "$PYTHON" -m pip install --quiet --no-compile --no-deps --target "$dir/$version" "bitsandbytes==$version"
  PYTHONPATH="$dir/$version" "$PYTHON" "$dir/products.py"
done
