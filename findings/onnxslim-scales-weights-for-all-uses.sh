#!/bin/sh
# Question: onnxslim promises "less operators, but same accuracy" for a model. A head gives the logits of flattened tokens;
#   one output is these logits as (batch, tokens, vocabulary) times a scale, the other their logsumexp without the scale. A
#   second model multiplies a causal convolution by a factor for each position. Are the outputs the same afterwards?
# Guess: yes, to rounding. The models are plain, and a fusion that does not fit is not made.
# Seen (onnxslim 0.1.98, torch 2.13.0, onnxruntime 1.32.0): no, and there is no message. The scale is multiplied into the
#   weights and the bias of the head, whoever else uses its output: the logsumexp is that of scaled logits, the scaled
#   logits are right. Without the logsumexp, the fusion is right. A vector after a convolution is multiplied into
#   its channels if it is as long as there are channels, whatever axis it belongs to: with 16 positions and 16 channels,
#   position t is not scaled by its factor. With 15 positions, or a sum instead of a product, the result is right.
# Hurts: exported models that return scaled logits beside scores, normalisers or routers of the unscaled ones, and
#   convolutions (Mamba, Hyena, audio) with decays or masks by position: one output is off, the rest is right. onnxsim
#   0.8.1 and onnxscript's optimizer keep all of these. Compare all outputs with the original's, on real inputs.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0 onnxslim==0.1.98
fi
"$PYTHON" -W ignore - "$dir/model.onnx" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import contextlib
import io
import sys

import numpy as np
import onnx
import onnxruntime
import onnxslim
import torch
from torch.nn import functional as F

torch.manual_seed(0)
head = torch.nn.Linear(16, 50)
kernel = torch.randn(16, 1, 3)


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.head = head

    def forward(self, inputs):
        return self.function(inputs)


def logits(x, normaliser=True):
    flat = head(x)
    scaled = flat.view(2, 3, 50) * 0.25
    return (scaled, flat.logsumexp(-1)) if normaliser else (scaled,)


def convolution(x, combine=torch.mul):
    factors = torch.linspace(1, 2, x.shape[2])
    return (combine(F.conv1d(F.pad(x, (2, 0)), kernel, groups=16), factors),)


def results(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: inputs.numpy()})


tokens = torch.randn(6, 16)
cases = (
    ("scaled logits alone", lambda x: logits(x, normaliser=False), tokens, [True]),
    ("scaled logits, logsumexp of the unscaled", logits, tokens, [True, False]),
    ("convolution * position, 15 positions", convolution, torch.randn(2, 16, 15), [True]),
    ("convolution + position, 16 positions", lambda x: convolution(x, torch.add), torch.randn(2, 16, 16), [True]),
    ("convolution * position, 16 positions", convolution, torch.randn(2, 16, 16), [False]),
)
print("onnxslim", onnxslim.__version__)
for name, function, inputs, right in cases:
    wanted = [tensor.detach().numpy() for tensor in function(inputs)]
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(Model(function).eval(), (inputs,), sys.argv[1])
    before = results(onnx.load(sys.argv[1]), inputs)
    after = results(onnxslim.slim(onnx.load(sys.argv[1])), inputs)
    assert all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(wanted, before, strict=True))
    for torchs, slim, expected in zip(wanted, after, right, strict=True):
        same = np.allclose(torchs, slim, rtol=1e-4, atol=1e-5)
        numbers = [[round(float(value), 3) for value in array.flatten()[-3:]] for array in (torchs, slim)]
        print(f"{name}: torch and onnxruntime … {numbers[0]}, after onnxslim … {numbers[1]}: "
              f"{'equal' if same else 'different'}")  # fmt: skip
        assert same == expected, "the behaviour has changed"
PY
