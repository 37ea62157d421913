#!/bin/sh
# Question: two variants are trained with 3 to 10 seeds each, or an evaluation has questions in 4 to 10 groups (passages,
#   subjects). statsmodels' OLS(...).fit(cov_type="HC1") or fit(cov_type="cluster", cov_kwds={"groups": …}) gives a
#   p-value. There is no effect. How often is p < 0.05?
# Guess: in about 5% of the experiments. The p-value is from Student's t, as in the same fit without cov_type.
# Seen (statsmodels 0.15.0): up to three times as often. With any robust cov_type, p-values and intervals are from the
#   normal distribution, as for endless data: 12% of the comparisons of three seeds with three are significant with HC1,
#   and 9 to 16% of the evaluations with clustered errors; with HC0, whose errors are also too small, 18%. The summary
#   writes z instead of t; there is no warning. use_t=True gives 5% with clusters. The documentation says so in the
#   description of use_t: None means True only for "nonrobust".
# Hurts: ablations and evaluations with few runs or groups: the recommended clustered errors are used, and one in eight
#   changes that do nothing looks significant.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile statsmodels==0.15.0 numpy==2.4.6 scipy==1.17.1 pandas==3.1.1
fi
"$PYTHON" -W ignore - <<'PY'
import numpy as np
import statsmodels
import statsmodels.api as sm

print("statsmodels", statsmodels.__version__)
random = np.random.default_rng(0)


def seeds(number, **fit):
    """The share of comparisons of two equal variants that have p < 0.05."""
    variant = sm.add_constant(np.repeat([0, 1], number))
    losses = random.normal(3.0, 0.01, (3000, 2 * number))
    return np.mean([sm.OLS(row, variant).fit(**fit).pvalues[1] < 0.05 for row in losses])


def groups(number, **fit):
    """The share of evaluations of two equal models, 20 questions in each group, that have p < 0.05."""
    group = np.repeat(np.arange(number), 20)
    fit |= {"cov_type": "cluster", "cov_kwds": {"groups": group}}
    found = 0
    for _ in range(1500):
        difference = random.normal(0, 0.7, number)[group] + random.normal(0, 1, len(group))
        found += sm.OLS(difference, np.ones(len(group))).fit(**fit).pvalues[0] < 0.05
    return found / 1500


for number in (3, 5, 10):
    shares = {kind: seeds(number, cov_type=kind) for kind in ("nonrobust", "HC0", "HC1", "HC3")}
    print(f"{number} seeds against {number}:", ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items()))
    assert abs(shares["nonrobust"] - 0.05) < 0.02
    if number == 3:
        assert shares["HC0"] > 0.13 and shares["HC1"] > 0.09, "the behaviour has changed"
for number in (4, 6, 10):
    normal, student = groups(number), groups(number, use_t=True)
    print(f"{number} groups of 20 questions: cluster {normal:.1%}, with use_t=True {student:.1%}")
    assert normal > 0.075 and student < 0.075, "the behaviour has changed"
PY
