#!/bin/sh
# Question: wandb.watch(model, log="all") logs histograms of gradients and weights. Half of a layer's gradient becomes
#   NaN, and then all of it. What do the histograms show?
# Guess: NaN in some way, an empty histogram or an error.
# Seen (wandb 0.31.0, torch 2.13.0): nothing unusual. NaN and infinity are removed first, so that the histogram of the
#   finite half is logged, of 5,000 instead of 10,000 numbers. Where all are NaN, nothing is logged, and the run's
#   summary keeps the histogram of the step before. Weights are treated in the same way. There is no message.
# Hurts: whoever looks for the layer and the step at which a run diverged: the histograms of a broken layer look as
#   before, with another height. Log the number of elements that are not finite beside them.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 wandb==0.31.0
fi
WANDB_MODE=offline WANDB_SILENT=true "$PYTHON" - "$dir" <<'PY'
import sys

import torch
import wandb

run = wandb.init(project="finding", dir=sys.argv[1])
torch.manual_seed(0)
layer = torch.nn.Linear(100, 100)
wandb.watch(layer, log="all", log_freq=1)


def logged(name):
    """How many numbers the last histogram has, and its bins' limits."""
    histogram = dict(run.summary[name])
    return sum(histogram["values"]), histogram["bins"][0], histogram["bins"][-1]


seen = {}
cases = {"finite": 0, "half of it NaN": 50, "all NaN": 100}
for name, broken in cases.items():
    factor = torch.ones(100)
    factor[:broken] = torch.nan
    layer.zero_grad()
    (layer(torch.randn(8, 100)) * factor).sum().backward()
    run.log({"step": broken})
    seen[name] = logged("gradients/weight")
    nan = layer.weight.grad.isnan().sum().item()
    print(f"gradient {name}: {nan:,} of 10,000 are NaN; histogram of {seen[name][0]:,}, {seen[name][1:]}")
with torch.no_grad():
    layer.weight[:50] = torch.nan
layer.zero_grad()
layer(torch.randn(8, 100)).sum().backward()
run.log({"step": -1})
seen["weights"] = logged("parameters/weight")
print(f"half of the weights NaN: histogram of {seen['weights'][0]:,}")
run.finish()
assert seen["finite"][0] == 10_000
assert seen["half of it NaN"][0] == seen["weights"][0] == 5000, "the behaviour has changed"
assert seen["all NaN"] == seen["half of it NaN"], "the behaviour where all are NaN has changed"
PY
