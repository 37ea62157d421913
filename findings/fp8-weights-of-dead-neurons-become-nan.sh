#!/bin/sh
# Question: a feedforward layer has one dead neuron, whose weights are all zero: it was pruned, or added to pad the layer
#   to a multiple of 16. The trained model is quantised to fp8 weights. What does it compute?
# Guess: what it computed before, up to 3%. A row of zeros has a scale that is clamped to a small number, as int8 and int4
#   quantisers of the same libraries do it, and stays zero.
# Seen (torchao 0.18.0, optimum-quanto 0.2.7, torch 2.13.0): NaN for every token. torchao's Float8WeightOnlyConfig and
#   quanto's qfloat8 have one scale per row, the row's maximum / 448, which is 0 here, and 0 / 0 is NaN. The next layer
#   spreads it, although its weights for this neuron are zero. Their int8 formats are right, and so are fp8 channels of
#   compressed-tensors 0.20.0.
# Hurts: fp8 deployment of pruned, padded or sparsely activated models: one row in millions ends all output. Quantising
#   says nothing, and tests on models with random weights pass.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 torchao==0.18.0 optimum-quanto==0.2.7 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch
from optimum.quanto import freeze, qfloat8, qint8, quantize
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_


def freeze_quantised(model, weights):
    quantize(model, weights=weights)
    freeze(model)


def run(quantise, dtype, dead_weight):
    """Number of NaN in the output and its relative error, with all weights of neuron 5 set to `dead_weight`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(dtype)
    with torch.no_grad():
        model[0].weight[5] = dead_weight
        model[0].bias[5] = 0
        model[2].weight[:, 5] = 0
    x = torch.randn(10, 64, dtype=dtype)
    before = model(x)
    quantise(model)
    after = model(x)
    assert not before.isnan().any()
    return after.isnan().sum().item(), ((after - before).norm() / before.norm()).item()


quantisers = {
    "torchao fp8": lambda model: quantize_(model, Float8WeightOnlyConfig()),
    "torchao int8": lambda model: quantize_(model, Int8WeightOnlyConfig()),
    "quanto fp8": lambda model: freeze_quantised(model, qfloat8),
    "quanto int8": lambda model: freeze_quantised(model, qint8),
}
seen = {}
for name, quantise in quantisers.items():
    for dtype, dead_weight in ((torch.float32, 1.0), (torch.float32, 0.0), (torch.bfloat16, 0.0)):
        seen[name, dtype, dead_weight] = count, error = run(quantise, dtype, dead_weight)
        print(f"{name}, {dtype}, neuron of {dead_weight}: {count} of 640 outputs are NaN, error {error:.1%}")
for (name, _, dead_weight), (count, error) in seen.items():
    if name.endswith("int8") or dead_weight == 1:
        assert count == 0 and error < 0.1, name
    else:
        assert count == 640, "the behaviour has changed"
PY
