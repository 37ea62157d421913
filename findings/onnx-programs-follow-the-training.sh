#!/bin/sh
# Question: program = torch.onnx.export(model, ..., dynamo=True) is made at the best step and kept in memory, and the model
#   trains on. At the end, program.save("best.onnx") is called. Which weights has the file?
# Guess: those of the best step; an export is a copy, as the older exporter's file was.
# Seen (torch 2.13.0, onnxscript 0.7.2, onnx 1.23.2, onnxruntime 1.32.0): the last ones. The program refers to the model's
#   tensors and reads them when it is saved or called. What the exporter computed of the weights, it computed at the export:
#   so a gain that enters as exp(scale), as Mamba's A_log does, stays at the best step, and the file is a mixture of two
#   steps. Nothing warns. Saving at once, or exporting copy.deepcopy(model), gives the weights of the export.
# Hurts: exports in the training loop whose file is written later: the "best" model is the last one, or neither.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 \
    numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import copy
import itertools
import sys

import numpy as np
import onnxruntime
import torch
from torch import nn

torch.manual_seed(0)
tokens = torch.arange(20).reshape(2, 10)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.scale = nn.Parameter(torch.randn(64))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return torch.exp(self.scale) * (hidden + self.down(torch.relu(self.up(hidden))))


def later_weights(path, best, last):
    """The names of the weights of which the file has the later values."""
    session = onnxruntime.InferenceSession(path)
    output = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})[0]
    for count in range(len(last) + 1):
        for names in itertools.combinations(last, count):
            mixed = Small()
            mixed.load_state_dict(best | {name: last[name] for name in names})
            with torch.no_grad():
                if np.abs(mixed(tokens).numpy() - output).max() < 1e-3:
                    return list(names)
    return "no mixture"


seen = {}
for case in ("saved at once", "saved later", "saved later, copy exported", "saved later, not optimised"):
    model = Small().eval()
    best = copy.deepcopy(model.state_dict())
    exported = copy.deepcopy(model) if "copy" in case else model
    optimise = "not optimised" not in case
    program = torch.onnx.export(exported, (tokens,), dynamo=True, optimize=optimise, verbose=False)
    path = f"{sys.argv[1]}/{case}.onnx"
    if case == "saved at once":
        program.save(path)
    with torch.no_grad():
        for parameter in model.parameters():  # training
            parameter.mul_(1.5).add_(0.1)
    if case != "saved at once":
        program.save(path)
    seen[case] = later_weights(path, best, model.state_dict())
    print(f"{case}: the file has the later values of {seen[case]}")
names = list(model.state_dict())
assert seen["saved at once"] == seen["saved later, copy exported"] == []
assert seen["saved later, not optimised"] == names, "the behaviour has changed"
assert seen["saved later"] == [name for name in names if name != "scale"], "the behaviour has changed"
PY
