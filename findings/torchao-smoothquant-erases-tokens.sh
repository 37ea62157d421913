#!/bin/sh
# Question: the down projection of a ReLU FFN is quantised to int8 by torchao's SmoothQuant. Five percent of its inputs, the
#   neurons, were zero in all of the calibration text. What is the output for a token for which one of them fires?
# Guess: as good as without SmoothQuant, or that neuron's part is less exact: nothing is known of its size.
# Seen (torchao 0.18.0, CPU): zero, the whole of it. The factor by which an input is divided is sqrt(largest input / largest
#   weight), and for a silent neuron about 0.001. So when it fires, it is a thousand times as large as the others, and they
#   are rounded to zero, since int8 has one scale per token; its own weights were rounded to zero already. At alpha=0.25, a
#   quarter of the output is wrong. int8 without SmoothQuant is right to 1%, and so is SmoothQuant on text like that of the
#   calibration.
# Hurts: sparse models, in which many neurons do not fire in a few hundred texts. Tests on similar text show nothing.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 torchao==0.18.0 numpy==2.4.6
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import copy

import torch
from torch import nn
from torchao.prototype.smoothquant import SmoothQuantConfig
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

WIDTH, NEURONS, SILENT = 64, 256, 13
torch.manual_seed(0)
up, relu, down = nn.Linear(WIDTH, NEURONS), nn.ReLU(), nn.Linear(NEURONS, WIDTH, bias=False)
with torch.no_grad():  # the first ones are silent, but neuron 0 where feature 0 is 1
    up.weight[:, 0], up.weight[:SILENT] = 0, 0
    up.weight[0, 0], up.bias[:SILENT] = 2, -1
model = nn.Sequential(up, relu, down).eval()
calibration, usual = torch.randn(2, 512, WIDTH)
calibration[:, 0] = usual[:, 0] = 0
other = usual.clone()
other[:, 0] = 1  # neuron 0 fires
int8 = Int8DynamicActivationInt8WeightConfig()


def only_down(module, name):
    return name == "2"


@torch.no_grad()
def errors(quantised):
    return [float((quantised(x) - model(x)).norm() / model(x).norm()) for x in (usual, other)]


with torch.no_grad():
    hidden = relu(up(other))
    print(f"neurons that are silent in the calibration: {int((relu(up(calibration)) == 0).all(0).sum())} of {NEURONS}; "
          f"neuron 0 fires with {hidden[0, 0]:.1f}, the largest has {hidden.max():.1f}")
plain = copy.deepcopy(model)
quantize_(plain, int8, filter_fn=only_down)
seen = {"int8": errors(plain)}
for alpha in (0.25, 0.5, 0.75):
    smooth = copy.deepcopy(model)
    quantize_(smooth, SmoothQuantConfig(base_config=int8, step="prepare", alpha=alpha), filter_fn=only_down)
    with torch.no_grad():
        smooth(calibration)
    quantize_(smooth, SmoothQuantConfig(base_config=int8, step="convert"), filter_fn=only_down)
    seen[alpha] = errors(smooth)
    if alpha == 0.5:
        with torch.no_grad():
            print(f"alpha 0.5: outputs that are zero: {(smooth(other) == 0).float().mean():.0%}")
for name, (on_usual, on_other) in seen.items():
    print(f"{name}: error on text like the calibration {on_usual:.1%}, where neuron 0 fires {on_other:.1%}")
assert all(on_usual < 0.03 for on_usual, _ in seen.values()) and seen["int8"][1] < 0.03
assert seen[0.5][1] > 0.5 and seen[0.75][1] > 0.5, "the behaviour has changed"
PY
