#!/bin/sh
# Question: a model is offloaded to a folder by accelerate's disk_offload or dispatch_model, evaluated and dropped. A
#   second checkpoint of the same architecture is loaded and offloaded to the same folder. Which weights does it compute
#   with?
# Guess: its own; the files are written again.
# Seen (accelerate 1.15.0, torch 2.13.0): those of the first. Both functions write the files only if the folder has no
#   index.json yet; the model's own weights are dropped, since they count as saved. With dispatch_model, layers on the
#   disk have the first model's weights, and layers in memory the second's, so the outputs are neither's. Nothing warns.
#   from_pretrained and load_checkpoint_and_dispatch with an offload_folder write anew, and are right.
# Hurts: comparisons of checkpoints of models that are larger than the memory: all score like the first, or like mixtures,
#   also in later runs that find the folder. Use a new folder for each model.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 accelerate==1.15.0 numpy==2.4.6
fi
CUDA_VISIBLE_DEVICES= "$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail "$dir/log"; exit 1; }
import copy
import sys

import torch
from accelerate import disk_offload, dispatch_model
from torch import nn

folder = sys.argv[1]
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
models = []
for seed in (1, 2):
    torch.manual_seed(seed)
    models.append(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).eval())
outputs = [model(x).detach() for model in models]
with torch.no_grad():
    mixture = models[1][2](models[0][1](models[0][0](x)))  # the first layer of the first model, the last of the second


def close(output, expected):
    return bool(torch.allclose(output, expected, atol=1e-5))


ways = {
    "disk_offload": lambda model, to: disk_offload(model, to, execution_device=torch.device("cpu")),
    "dispatch_model": lambda model, to: dispatch_model(
        model, {"0": "disk", "1": "cpu", "2": "cpu"}, main_device="cpu", offload_dir=to, force_hooks=True
    ),
}
for name, offload in ways.items():
    for same in (False, True):
        seen = []
        for number, model in enumerate(models):
            model = copy.deepcopy(model)
            offload(model, f"{folder}/{name}{'' if same else number}{same}")
            with torch.no_grad():
                seen.append(model(x))
        print(f"{name}, the same folder for both: {same}; the first model is right: {close(seen[0], outputs[0])}, "
              f"the second: {close(seen[1], outputs[1])}; it is the first: {close(seen[1], outputs[0])}, "
              f"a mixture: {close(seen[1], mixture)}")
        assert close(seen[0], outputs[0])
        if not same:
            assert close(seen[1], outputs[1])
        else:
            assert close(seen[1], outputs[0] if name == "disk_offload" else mixture), "the behaviour has changed"
PY
