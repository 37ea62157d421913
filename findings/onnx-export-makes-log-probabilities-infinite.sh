#!/bin/sh
# Question: torch.onnx.export (dynamo=True, the default) exports parts that work in the log domain: gates, preferences and
#   their losses by F.logsigmoid and F.binary_cross_entropy_with_logits, and sums of probabilities by torch.logaddexp and
#   torch.logcumsumexp. torch has these functions so that they neither underflow nor overflow. Does onnxruntime's result
#   stay finite?
# Guess: yes, as in torch; at worst from -87 or 88 on, where exp itself leaves fp32.
# Seen (torch 2.13.0, onnxscript 0.7.2, onnxruntime 1.32.0): no, and there is no message. logsigmoid is written as
#   log(sigmoid(x)), and onnxruntime's sigmoid is 0 from -18 on: logsigmoid(-18) is -inf, at -16 it is 0.6 off, and the loss
#   of a logit of -18 is inf. logaddexp is log(exp(a) + exp(b)): -inf for two logs of -120, inf for 100. logcumsumexp is
#   -inf where the first logs are far below the maximum. -F.softplus(-x) and torch.stack((a, b)).logsumexp(0) are right.
# Hurts: exported models with forget gates in logs, rewards or preference scores, detectors with their loss, or scores of
#   sequences: one value of -inf makes the sums over it infinite, the products NaN, and short or easy inputs do not show it.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0
fi
"$PYTHON" -W ignore - "$dir/model.onnx" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import contextlib
import io
import sys

import onnxruntime
import torch
from torch.nn import functional as F

logits = torch.tensor([-2.0, -16.0, -18.0, -50.0])
logs = torch.tensor([-500.0, -120.0, -50.0, 0.0, 100.0])


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


def exported(function, inputs):
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(Model(function).eval(), (inputs,), sys.argv[1])
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])


def bce(x):
    return F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none")


cases = (
    ("-softplus(-x)", lambda x: -F.softplus(-x), logits, 0),
    ("logsigmoid(x)", F.logsigmoid, logits, 2),
    ("binary_cross_entropy_with_logits(x, 1)", bce, logits, 2),
    ("logsumexp of (x, x - 1)", lambda x: torch.stack((x, x - 1)).logsumexp(0), logs, 0),
    ("logaddexp(x, x - 1)", lambda x: torch.logaddexp(x, x - 1), logs, 3),
    ("logcumsumexp(x)", lambda x: x.logcumsumexp(0), logs, 3),
)
print("torch", torch.__version__, "onnxruntime", onnxruntime.__version__)
for name, function, inputs, infinite in cases:
    wanted, seen = function(inputs), exported(function, inputs)
    rounded = [[round(value, 2) for value in tensor.tolist()] for tensor in (wanted, seen)]
    print(f"{name}: torch {rounded[0]}, onnxruntime {rounded[1]}")
    assert wanted.isfinite().all() and seen.isinf().sum() == infinite, "the behaviour has changed"
    assert torch.allclose(wanted, seen, rtol=1e-4) == (infinite == 0), "the behaviour has changed"
PY
