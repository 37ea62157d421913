#!/bin/sh
# Question: Lightning or its Fabric trains with precision="bf16-true". The model's forward pass makes tensors of its
#   own: positions by torch.arange(512) * 1.0, and a counter of tokens by torch.zeros(4). Which dtype do they have?
# Guess: fp32, torch's default. The weights are bf16.
# Seen (lightning 2.6.6, torch 2.13.0): bf16. While forward runs, Lightning sets torch's default dtype to bf16, and it
#   converts floating-point inputs too. The 512 positions have 385 different values, a counter of 1,000 tokens that is
#   increased one by one ends at 256, and RoPE's frequencies, 10000 ** -(torch.arange(0, 64, 2) / 64), are rounded by up
#   to 0.4%. With "bf16-mixed", or a dtype that is given explicitly, all are right.
# Hurts: positions, masks, counters of experts and statistics that rely on the default dtype: models train with
#   positions that coincide, and statistics that look plausible, while the same code is right outside Lightning.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 lightning==2.6.6 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch
from lightning.fabric import Fabric


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        positions = torch.arange(512) * 1.0
        counter = torch.zeros(4)
        for _ in range(1000):
            counter += 1
        frequencies = 10000 ** -(torch.arange(0, 64, 2) / 64)
        self.seen = positions.dtype, len(positions.unique()), counter[0].item(), frequencies.double()
        return self.layer(x)


exact = 10000 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
seen = {}
for precision in ("32-true", "bf16-mixed", "bf16-true"):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model = fabric.setup(Model())
    model(torch.randn(2, 4))
    dtype, positions, counter, frequencies = model.seen
    error = (frequencies / exact - 1).abs().max().item()
    seen[precision] = positions, counter, error
    print(f"{precision}: {dtype}, {positions} positions, counter {counter:g}, frequencies off by {error:.2%}")
for precision in ("32-true", "bf16-mixed"):
    assert seen[precision][:2] == (512, 1000) and seen[precision][2] < 1e-5
assert seen["bf16-true"][:2] == (385, 256) and seen["bf16-true"][2] > 0.002, "the behaviour has changed"
PY
