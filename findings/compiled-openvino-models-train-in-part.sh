#!/bin/sh
# Question: a torch model is converted by openvino.convert_model and compiled for the CPU, say for an evaluation beside the
#   training. The torch model trains on, or loads other weights. Which weights has the compiled model?
# Guess: those of the time when it was compiled.
# Seen (openvino 2026.4.1, torch 2.13.0, x86 CPU): some of each. Embeddings and biases are read from torch's memory, and so
#   follow the training; matrices were packed when the model was compiled, and the norms' weights copied when it was
#   converted, and these stay. No model ever had such weights. A converted model that is saved or compiled later has the
#   later weights but the old norms. With share_weights=False, all stay. Nothing warns.
# Hurts: evaluations in the loop, averages of weights and comparisons of checkpoints by OpenVINO: outputs that are neither
#   the old nor the new model's.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 openvino==2026.4.1 numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import copy
import itertools
import sys

import numpy as np
import openvino
import torch
from torch import nn

torch.manual_seed(0)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


core = openvino.Core()
model = Small().eval()
nn.init.normal_(model.norm.weight, 1, 0.1)  # weights of exactly 1 are dropped by the conversion
nn.init.normal_(model.norm.bias, 0, 0.1)
tokens = torch.arange(20)
first = copy.deepcopy(model)
trained = {name: 1.5 * value + 0.1 for name, value in model.state_dict().items()}


def compile_model(converted):
    return core.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def later_weights(output):
    """The names of the weights that the output was computed with the later values of."""
    for count in range(len(trained) + 1):
        for names in itertools.combinations(trained, count):
            mixed = copy.deepcopy(first)
            mixed.load_state_dict(first.state_dict() | {name: trained[name] for name in names})
            with torch.no_grad():
                if np.abs(mixed(tokens).numpy() - output).max() < 1e-3:
                    return list(names)
    return "no mixture"


shared = openvino.convert_model(model, example_input=tokens)
own = openvino.convert_model(model, example_input=tokens, share_weights=False)
compiled = {"shared": compile_model(shared), "share_weights=False": compile_model(own)}
for name, run in compiled.items():
    assert later_weights(run([tokens.numpy()])[0]) == []
model.load_state_dict(trained)  # in place, as an optimizer's step
openvino.save_model(shared, f"{sys.argv[1]}/model.xml", compress_to_fp16=False)
compiled |= {"compiled later": compile_model(shared), "saved later": compile_model(f"{sys.argv[1]}/model.xml")}
seen = {name: later_weights(run([tokens.numpy()])[0]) for name, run in compiled.items()}
for name, names in seen.items():
    print(f"{name}: has the later values of {names}")
assert seen["share_weights=False"] == [] and seen["compiled later"] == seen["saved later"]
matrices = ["embedding.weight", "up.weight", "up.bias", "down.weight", "down.bias"]
assert seen["compiled later"] == matrices, "the behaviour has changed"
assert seen["shared"] == ["embedding.weight", "up.bias", "down.bias"], "the behaviour has changed"
PY
