#!/bin/sh
# Question: a scaling law, a temperature or an interpolation weight is fitted by scipy.optimize.minimize, without a
#   gradient. The loss is computed by torch, JAX or numpy in fp32, and returned as a Python float. Does it find the
#   minimum?
# Guess: to three digits, as fp32 allows, or the result says success=False.
# Seen (scipy 1.17.1): it returns the start, after one step, with success=True. The default methods (BFGS, and L-BFGS-B
#   with bounds) and SLSQP differentiate by steps of 1.5e-8, which is less than the rounding of fp32 numbers, so that the
#   loss does not change, and its gradient is zero. Nelder-Mead is right, and so is options={"eps": 1e-3}, or an fp64
#   loss.
# Hurts: calibration (temperature 1.0 is "best"), scaling laws and merges: the fit agrees with its first guess. Compute
#   the loss in fp64, give the gradient (jac), or begin at two starts.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile scipy==1.17.1 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax

generator = np.random.default_rng(0)
logits = generator.standard_normal((4000, 50)).astype(np.float32)
targets = np.argmax(logits + generator.gumbel(size=logits.shape), axis=1)  # calibrated
logits *= 2.5  # overconfident: the right temperature is 2.5


def loss(temperature, dtype):
    scaled = logits.astype(dtype) / dtype(temperature[0])
    return float(-log_softmax(scaled, axis=1)[np.arange(4000), targets].mean())


seen = {}
for name, dtype, options in (
    ("BFGS, fp64", np.float64, {}),
    ("BFGS, fp32", np.float32, {}),
    ("L-BFGS-B, fp32", np.float32, {"bounds": [(0.1, 10)]}),
    ("SLSQP, fp32", np.float32, {"method": "SLSQP"}),
    ("BFGS, fp32, eps=1e-3", np.float32, {"options": {"eps": 1e-3}}),
    ("Nelder-Mead, fp32", np.float32, {"method": "Nelder-Mead"}),
):
    fit = minimize(loss, [1.0], args=(dtype,), **options)
    seen[name] = fit.x[0], fit.success
    print(f"{name}: temperature {fit.x[0]:.3f}, loss {fit.fun:.4f}, success {fit.success}, {fit.nfev} losses")
for name in ("BFGS, fp64", "Nelder-Mead, fp32"):
    assert abs(seen[name][0] - 2.5) < 0.15
assert abs(seen["BFGS, fp32, eps=1e-3"][0] - 2.5) < 0.15
for name in ("BFGS, fp32", "L-BFGS-B, fp32", "SLSQP, fp32"):
    assert seen[name] == (1.0, True), "the behaviour has changed"
PY
