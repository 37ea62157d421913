#!/bin/sh
# Question: a scaling law in the form of Kaplan et al., L = E + (Nc / N)^alpha, is fitted to 24 losses by
#   scipy.optimize.curve_fit. Nc is about 1e13. Do the error bars depend on bounds=(0, inf), which no parameter reaches?
# Guess: no. The fit is the same, so the covariance is; or a parameter without one gets infinity and a warning.
# Seen (scipy 1.17.1): they do. Without bounds, E is 1.56 +- 0.058, and Nc has an error of 10%. With bounds, E is 1.54
#   +- 0.010, and the error of Nc is 5e-16, which is 0. There is no warning. Over 300 repetitions with other noise, E
#   spreads by 0.073. With bounds, curve_fit inverts the Jacobian by its singular values and drops those below about 1e-14
#   of the largest, whatever the units of the parameters; a direction that is dropped gets variance 0, not infinity. With
#   Nc in units of 1e13, both ways agree.
# Hurts: error bars of scaling laws, and of the losses that they predict: of the 95% intervals with bounds, 26% contain the
#   true E. Divide a parameter by its unit, or fit log Nc. That the covariances of the methods differ is known as SciPy
#   issue 22568.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile scipy==1.17.1 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import warnings

import numpy as np
from scipy.optimize import curve_fit

N = np.logspace(6.5, 10, 24)
E, NC, ALPHA = 1.5, 1e13, 0.2
generator = np.random.default_rng(0)


def law(N, E, Nc, alpha, unit=1.0):
    return E + (Nc * unit / N) ** alpha


def fit(losses, unit=1.0, **options):
    start = [E, 2 * NC / unit, 1.2 * ALPHA]
    values, covariance = curve_fit(lambda *a: law(*a, unit=unit), N, losses, p0=start, maxfev=100_000, **options)
    return values * [1, unit, 1], np.sqrt(np.diag(covariance)) * [1, unit, 1]


losses = law(N, E, NC, ALPHA) * (1 + generator.normal(0, 0.003, N.size))
ways = {
    "without bounds": {},
    "with bounds": {"bounds": (0, np.inf)},
    "with bounds, Nc in units of 1e13": {"bounds": (0, np.inf), "unit": 1e13},
}
fits = {}
for name, options in ways.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fits[name] = fit(losses, **options)
    warned = [str(warning.message) for warning in caught if "ovariance" in str(warning.message)]
    (e, nc, alpha), (e_error, nc_error, alpha_error) = fits[name]
    print(f"{name}: E {e:.4f} +- {e_error:.4f}, Nc {nc:.3g} +- {nc_error:.2g}, alpha {alpha:.4f} +- {alpha_error:.5f}; "
          f"warnings {warned}")
    assert not warned
inside, estimates = dict.fromkeys(ways, 0), []
repetitions = 300
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _ in range(repetitions):
        losses = law(N, E, NC, ALPHA) * (1 + generator.normal(0, 0.003, N.size))
        for name, options in ways.items():
            values, errors = fit(losses, **options)
            inside[name] += abs(values[0] - E) < 2.08 * errors[0]  # Student's t, 21 degrees of freedom
        estimates.append(values[0])
shares = {name: count / repetitions for name, count in inside.items()}
print(f"standard deviation of E over {repetitions} repetitions: {np.std(estimates):.4f}")
print("share of 95% intervals that contain E:", shares)
free, bounded = fits["without bounds"], fits["with bounds"]
assert np.allclose(free[0], bounded[0], rtol=0.1) and 0.85 < shares["without bounds"]
assert 0.85 < shares["with bounds, Nc in units of 1e13"]
assert bounded[1][0] < free[1][0] / 4 and bounded[1][1] < 1 and shares["with bounds"] < 0.4, "the behaviour has changed"
PY
