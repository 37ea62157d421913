#!/bin/sh
# Question: a 4-bit model was fine-tuned by LoRA in MLX-LM, and mlx_lm.fuse merges the adapter into the weights (without
#   --dequantize, so they stay 4 bits). How much of the fine-tuning is left?
# Guess: nearly all, with the noise of 4-bit weights, about a tenth of the outputs. The base model has that noise too.
# Seen (mlx-lm 0.32.2, mlx 0.32.4, CPU): hardly any, if the change is as small as LoRA's usually are. Base weights lie on
#   the grid of the 4 bits already; a change below half a step is rounded back, and the noise is added to what is lost. Of
#   a change of 2% of the weights (by norm), an eighth is left, at 5% a quarter, and the error is larger than the change
#   itself; from 20% on, nearly all is left. In NVFP4, 1% of a change of 2% is left. 8 bits keep it. There is no message.
# Hurts: fused QLoRA models, which answer much like the base model, though the loss with the adapter was good. Keep the
#   adapter beside the model, or fuse with --dequantize.
# To use an existing Python that has the packages, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile "mlx[cpu]==0.32.4" mlx-lm==0.32.2 numpy==2.4.6
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import mlx.core as mx
from mlx import nn
from mlx_lm.tuner.lora import LoRALinear

WIDTH = 512
mx.set_default_device(mx.cpu)
mx.random.seed(0)
inputs = mx.random.normal((64, WIDTH))
left = {}
for bits, group, mode in ((8, 64, "affine"), (4, 64, "affine"), (4, 16, "nvfp4")):
    for size in (0.02, 0.05, 0.2):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        layer.weight = 0.02 * mx.random.normal((WIDTH, WIDTH))
        base = layer.to_quantized(group, bits, mode=mode)
        weight = mx.dequantize(base.weight, base.scales, base.get("biases"), group, bits, mode=mode)
        lora = LoRALinear.from_base(base, r=8, scale=20.0)
        lora.lora_b = mx.random.normal(lora.lora_b.shape)
        update = lora.scale * lora.lora_b.T @ lora.lora_a.T
        lora.lora_b = lora.lora_b * (size * mx.linalg.norm(weight) / mx.linalg.norm(update))
        wanted = lora(inputs) - base(inputs)  # what the adapter changes
        seen = lora.fuse()(inputs) - base(inputs)
        exact = lora.fuse(dequantize=True)(inputs) - base(inputs)
        assert mode == "nvfp4" or mx.linalg.norm(exact - wanted) < 1e-3 * mx.linalg.norm(wanted)
        left[bits, mode, size] = float((wanted * seen).sum() / (wanted * wanted).sum())
        error = float(mx.linalg.norm(seen - wanted) / mx.linalg.norm(wanted))
        print(f"{bits} bits ({mode}), a change of {size:.0%} of the weights: {left[bits, mode, size]:.0%} of it is left "
              f"in the fused layer, error {error:.2f} of the change")
assert all(left[8, "affine", size] > 0.95 for size in (0.02, 0.05, 0.2))
assert left[4, "affine", 0.2] > 0.9
assert left[4, "affine", 0.02] < 0.25 and left[4, "nvfp4", 0.02] < 0.1, "the behaviour has changed"
PY
