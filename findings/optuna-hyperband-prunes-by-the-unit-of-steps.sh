#!/bin/sh
# Question: 150 trials report a loss 100 times each to optuna's HyperbandPruner, with its defaults. Once the steps are
#   counted as 1 to 100, once as tokens, from 1,000,000 to 100,000,000. Does the unit matter?
# Guess: no. Hyperband compares trials at fractions of the longest run, which it finds by itself: max_resource="auto".
# Seen (optuna 5.0.0): it does. In steps, about 40% of the trials are stopped at their first report, in tokens about 90%.
#   The rungs begin at min_resource=1, one token, and grow by a factor of 3. The first report, after a million tokens,
#   passes about 13 rungs at once, and has to be among the best third in each. What is meant as a race over the whole run
#   is decided by one early loss. SuccessiveHalvingPruner(min_resource=1) stops 97% at the first report; its default,
#   "auto", is right in both units, and so is HyperbandPruner(min_resource=1_000_000).
# Hurts: searches whose steps are tokens, samples or large step numbers at the first evaluation: learning rates and
#   schedules that are good in the end but slow at first are never run. The documentation says that min_resource is "the
#   minimum resource allocated to a trial"; set it to the step of the first report.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile optuna==5.0.0 numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import numpy as np
import optuna
from optuna.pruners import HyperbandPruner, SuccessiveHalvingPruner

optuna.logging.set_verbosity(optuna.logging.ERROR)
print("optuna", optuna.__version__)
TRIALS, REPORTS = 150, 100


def first_stops(pruner, unit):
    """The share of the trials that are stopped at their first report, where each report is `unit` steps after the last."""
    random = np.random.default_rng(0)
    final, noise = random.random(TRIALS), random.normal(0, 0.05, (TRIALS, REPORTS))
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(study_name="search", pruner=pruner, sampler=sampler)
    stopped = 0
    for number in range(TRIALS):
        trial = study.ask()
        trial.suggest_float("rate", 0, 1)
        for report in range(1, REPORTS + 1):
            loss = final[number] + (3 + noise[number, report - 1]) / report**0.5
            trial.report(loss, report * unit)
            if trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                stopped += report == 1
                break
        else:
            study.tell(trial, loss)
    return stopped / TRIALS


PRUNERS = {
    "HyperbandPruner()": lambda unit: HyperbandPruner(),
    "HyperbandPruner(min_resource=first step)": lambda unit: HyperbandPruner(min_resource=unit),
    "SuccessiveHalvingPruner()": lambda unit: SuccessiveHalvingPruner(),
    "SuccessiveHalvingPruner(min_resource=1)": lambda unit: SuccessiveHalvingPruner(min_resource=1),
}
seen = {}
for name, make in PRUNERS.items():
    seen[name] = [first_stops(make(unit), unit) for unit in (1, 1000, 1_000_000)]
    shares = ", ".join(f"{share:.0%}" for share in seen[name])
    print(f"{name}: stopped at the first report with steps of 1, 1,000 and 1,000,000: {shares}")
hyperband, with_minimum, halving, halving_from_1 = seen.values()
assert max(halving) - min(halving) < 0.05 and max(with_minimum) < 0.6
assert hyperband[2] > 0.8 > 0.6 > hyperband[0] and halving_from_1[2] > 0.9, "the behaviour has changed"
PY
