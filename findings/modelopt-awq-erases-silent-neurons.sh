#!/bin/sh
# Question: a ReLU FFN is quantised by NVIDIA's ModelOpt, to 4 bits by AWQ (INT4_AWQ_CFG) or to 8 bits by SmoothQuant
#   (INT8_SMOOTHQUANT_CFG). Five percent of the neurons were silent in the calibration text. What becomes of them?
# Guess: they are quantised as without AWQ. Its paper says that it does not overfit the calibration text, unlike GPTQ, and
#   it only scales inputs, by a factor of theirs; the code sets the factor of inputs that were zero to 1.
# Seen (nvidia-modelopt 0.47.0, CPU): they are gone; where they fire, all of their part of the output is missing. AWQ scales
#   their weights by 1/100 and SmoothQuant by 1/10,000, the bounds of the factors, so they are rounded to zero beside the
#   others in their group or row. Of a token in which they make half of the output, half is lost; without AWQ and
#   SmoothQuant (INT4 by blocks, INT8), the error is 9% and 1%. On text like that of the calibration, all are equally good.
#   Nothing warns.
# Hurts: sparse models: what a neuron for code, for another language or for rare names knows, is lost, and perplexity on
#   text like that of the calibration does not show it.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 nvidia-modelopt==0.47.0 numpy==2.4.6
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import contextlib
import copy
import io

import modelopt.torch.quantization as mtq
import torch
from torch import nn

WIDTH, NEURONS, SILENT = 64, 256, 13
torch.manual_seed(0)
up, relu, down = nn.Linear(WIDTH, NEURONS), nn.ReLU(), nn.Linear(NEURONS, WIDTH, bias=False)
with torch.no_grad():  # the first neurons fire where feature 0 is 1
    up.weight[:, 0], up.weight[:SILENT] = 0, 0
    up.weight[:SILENT, 0], up.bias[:SILENT] = 2, -1
model = nn.Sequential(up, relu, down).eval()
calibration, usual = torch.randn(2, 512, WIDTH)
calibration[:, 0] = usual[:, 0] = 0
other = usual.clone()
other[:, 0] = 1


def calibrate(quantised):
    with torch.no_grad():
        quantised(calibration)


def error(output, right):
    return float((output - right).norm() / right.norm())


with torch.no_grad():
    hidden = relu(up(other))
    part = torch.where(torch.arange(NEURONS) < SILENT, hidden, 0)
    print(f"silent in the calibration: {int((relu(up(calibration)) == 0).all(0).sum())} of {NEURONS}; they fire with "
          f"{part.max():.1f}, the largest has {hidden.max():.1f}; "
          f"their part: {down(part).norm() / down(hidden).norm():.0%}")
    seen = {}
    for name in ("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "INT4_AWQ_CFG", "INT8_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG"):
        with contextlib.redirect_stdout(io.StringIO()):
            quantised = mtq.quantize(copy.deepcopy(model), copy.deepcopy(getattr(mtq, name)), calibrate)
        seen[name] = [
            error(quantised(usual), model(usual)),
            error(quantised(other), model(other)),
            error(quantised[2](part), down(part)),
        ]
        usual_error, other_error, part_error = seen[name]
        print(f"{name}: error on text like the calibration {usual_error:.0%}, where they fire {other_error:.0%}; "
              f"of their part {part_error:.0%}")
assert all(errors[0] < 0.15 for errors in seen.values())
assert seen["INT4_BLOCKWISE_WEIGHT_ONLY_CFG"][2] < 0.15 and seen["INT8_DEFAULT_CFG"][2] < 0.05
for name in ("INT4_AWQ_CFG", "INT8_SMOOTHQUANT_CFG"):
    assert seen[name][2] > 0.9, "the behaviour has changed"
PY
