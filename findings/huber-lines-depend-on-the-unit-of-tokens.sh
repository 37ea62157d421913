#!/bin/sh
# Question: the losses of 200 evaluations fall from 4.0 by 0.3 per billion tokens, with a few outliers. scikit-learn's
#   HuberRegressor fits a line to loss and tokens (1e8 to 5e9). Does the line depend on whether tokens are counted one by
#   one, in thousands or in billions?
# Guess: no, but for its small penalty; or there is a warning that the fit did not converge.
# Seen (scikit-learn 1.9.1, scipy 1.17.1): it does. In millions and billions, the line is right. In tokens and in thousands,
#   the loss rises by 0.86 per billion from a loss of 0, the scale of the errors is 1, its initial value, and half of the
#   points are outliers. The fit ends after 6 steps, with no warning. Neither alpha=0 nor more steps and a smaller tolerance
#   change it: the intercept and the scale have gradients so much smaller than the slope's that the minimiser takes the
#   first line for the best. LinearRegression and QuantileRegressor give the same line in each unit.
# Hurts: robust trends of loss, of gradient norms or of throughput over tokens, and of scores over parameters: the trend can
#   have the wrong sign. Scale x to about 1 first, or take its logarithm, and look at intercept_ and scale_. A comment in
#   scikit-learn's issue 27777 reports the same of timestamps.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile scikit-learn==1.9.1 scipy==1.17.1 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import numpy as np
import sklearn
from sklearn.linear_model import HuberRegressor, LinearRegression, QuantileRegressor

print("scikit-learn", sklearn.__version__)
tokens = np.linspace(1e8, 5e9, 200)
losses = 4 - 0.3 * tokens / 1e9 + np.random.default_rng(0).normal(0, 0.01, 200)
losses[::20] += 1
slopes = {}
for name, model in (
    ("HuberRegressor()", HuberRegressor()),
    ("HuberRegressor(alpha=0, max_iter=10_000, tol=1e-10)", HuberRegressor(alpha=0, max_iter=10_000, tol=1e-10)),
    ("LinearRegression()", LinearRegression()),
    ("QuantileRegressor(alpha=0)", QuantileRegressor(alpha=0)),
):
    for unit in (1, 1e3, 1e6, 1e9):
        fit = model.fit(tokens[:, None] / unit, losses)
        slopes[name, unit] = fit.coef_[0] / unit * 1e9
        rest = f", scale {fit.scale_:.4f}, {fit.n_iter_} steps" if "Huber" in name else ""
        print(f"{name}, unit {unit:g}: {slopes[name, unit]:+.4f} per 1e9 tokens, {fit.intercept_:.4f} at 0{rest}")
for (name, unit), slope in slopes.items():
    if "Huber" in name and unit < 1e6:
        assert slope > 0.5, "the behaviour has changed"
    else:
        assert abs(slope + 0.3) < 0.02
PY
