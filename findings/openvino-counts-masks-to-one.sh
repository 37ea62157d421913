#!/bin/sh
# Question: openvino.convert_model converts a torch model for OpenVINO. Its positions are counted from a boolean mask,
#   mask.cumsum(1); n-grams of tokens are hashed in int64; other parts use round(decimals=1), softplus(beta=2),
#   var(correction=2), embedding_bag(padding_idx=3) and floor division. Does it compute what torch computes?
# Guess: yes, in full precision to rounding, or the conversion is refused, as it is for many functions.
# Seen (OpenVINO 2026.4.1, torch 2.13.0, CPU, INFERENCE_PRECISION_HINT "f32"): none of these, and there is no message. The
#   cumulative sum of a boolean mask is boolean: every position but the first zeros is 1. int64 is computed in 32 bits, so
#   hashes wrap at 2^31. decimals, beta, correction and padding_idx are ignored. -1 // 3 is 0, not -1. A sum of the mask
#   and a cumulative sum of mask.long() are right.
# Hurts: models for OpenVINO with positions from a mask, hashed n-grams, or such functions: their outputs are wrong and
#   look plausible. Compare a converted model with the original on real inputs before it is used.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 openvino==2026.4.1
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import openvino
import torch
from torch.nn import functional as F

core = openvino.Core()
torch.manual_seed(0)
numbers = torch.tensor([[0.31, -0.72, 1.26, -0.08]])
tokens = torch.tensor([[50_000, 17, 31_337, 4]])
mask = torch.tensor([[0, 0, 7, 7, 7, 7]])  # padding, then tokens
weight = torch.arange(8.0).view(4, 2)


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


def converted(function, inputs):
    model = openvino.convert_model(Model(function).eval(), example_input=(inputs,))
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([inputs.numpy()])[0].copy())


cases = (
    ("sum of a mask", lambda x: (x > 0).sum(1), mask, True),
    ("cumulative sum of mask.long()", lambda x: (x > 0).long().cumsum(1), mask, True),
    ("cumulative sum of a mask", lambda x: (x > 0).cumsum(1), mask, False),
    ("hash of two tokens, int64", lambda x: x[:, :-1] * 1_000_003 + x[:, 1:], tokens, False),
    ("floor division by 3", lambda x: x // 3, torch.tensor([[-1, -2, -3, 5]]), False),
    ("round(decimals=1)", lambda x: x.round(decimals=1), numbers, False),
    ("softplus(beta=2)", lambda x: F.softplus(x, beta=2), numbers, False),
    ("var(correction=2)", lambda x: x.var(1, correction=2), numbers, False),
    ("embedding_bag(padding_idx=3)", lambda x: F.embedding_bag(x, weight, mode="sum", padding_idx=3),
     torch.tensor([[3, 1, 1, 3]]), False),
)  # fmt: skip
print("openvino", openvino.__version__)
for name, function, inputs, right in cases:
    wanted, seen = function(inputs), converted(function, inputs)
    same = torch.allclose(wanted.double(), seen.double(), rtol=1e-4, atol=1e-5)
    rounded = [[round(value, 3) for value in tensor.flatten().tolist()] for tensor in (wanted, seen)]
    print(f"{name}: torch {rounded[0]}, OpenVINO {rounded[1]}: {'equal' if same else 'different'}")
    assert same == right, "the behaviour has changed"
PY
