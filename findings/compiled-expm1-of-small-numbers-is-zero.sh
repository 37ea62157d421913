#!/bin/sh
# Question: expm1(x) exists since exp(x) - 1 loses small x. Does torch.compile keep its precision on a CPU?
# Guess: yes, to 1e-5: compiled functions agree with eager mode's up to a few units in the last place.
# Seen (torch 2.13.0, AVX-512 and AVX2): no. expm1(1e-8) is 0, expm1(1e-6) is 4.6% off: it is computed as exp(x) - 1. F.elu,
#   selu and celu of small negative numbers, and their gradients, are alike; so are erf and atanh (erf(1e-8) is 0, too).
#   Eager mode and fp64 are right, and so are log1p, tanh, sinh, softplus and logsigmoid. PyTorch's issues 189803 (expm1)
#   and 198183 (erf, atanh) describe it.
# Hurts: the k3 estimator of a KL divergence, expm1(r) - r, which is never below zero: it is -4.6e-8 for r = 1e-6, where
#   5e-13 is right, as long as the policies are close. Also ELU networks and 1 - exp(-x) of small rates.
# Packages: needs a C++ compiler; torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
TORCHINDUCTOR_CACHE_DIR="$dir/cache" "$PYTHON" - <<'PY'
import torch
from torch.nn import functional as F

SMALL = (1e-8, 1e-6, 1e-4)
FUNCTIONS = {
    "expm1(x)": torch.expm1,
    "elu(-x)": lambda x: F.elu(-x),
    "erf(x)": torch.erf,
    "atanh(x)": torch.atanh,
    "log1p(x)": torch.log1p,
    "tanh(x)": torch.tanh,
    "expm1(x) - x": lambda x: torch.expm1(x) - x,
}
for name, function in FUNCTIONS.items():
    for number in SMALL:
        x = torch.full((64,), number)
        torch._dynamo.reset()
        eager, compiled = function(x)[0].item(), torch.compile(function)(x)[0].item()
        print(f"{name} of {number:g}: eager {eager:.4g}, compiled {compiled:.4g}")
        if name in ("log1p(x)", "tanh(x)"):
            assert abs(compiled / eager - 1) < 1e-6
        elif number == 1e-8:
            assert compiled != eager and (compiled == 0 or name == "expm1(x) - x"), "the behaviour has changed"
        elif name == "expm1(x) - x" and number == 1e-6:
            assert compiled < -1e-8 and eager >= 0, "the behaviour has changed"
PY
