#!/bin/sh
# Question: ReduceLROnPlateau(mode="max", patience=3) watches a validation log-likelihood, which stays at -2 for 30 epochs.
#   How often is the learning rate cut?
# Guess: seven times, as for a metric that stays at +2.
# Seen (torch 2.13.0): never. By default a metric must be better than the best one by a relative threshold, best * (1 +
#   1e-4), and for a negative number that is worse than the best. So every epoch counts as an improvement. A metric that
#   falls by less than 0.01% per epoch counts as improving too, and the "best" falls with it. mode="min" does the same with
#   losses below zero. The formulas are documented, without a word on negative metrics. threshold_mode="abs" is right.
# Hurts: schedules by log-likelihoods, negative rewards, ELBOs and losses of densities: the rate never falls, and the run
#   stays at its plateau, while the same code with the sign turned works. There is no message.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def cuts(mode, metrics, **options):
    """How often the rate is divided by 10, and the best metric by the scheduler's record."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, mode=mode, patience=3, factor=0.1, eps=0, **options)
    rates = []
    for metric in metrics:
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    return sum(new < old for old, new in zip([1.0, *rates], rates, strict=False)), scheduler.best


seen = {}
falling = [-2 - 1e-4 * epoch for epoch in range(30)]
for name, mode, metrics in (
    ("constant +2", "max", [2.0] * 30),
    ("constant -2", "max", [-2.0] * 30),
    ("falling from -2", "max", falling),
    ("constant loss of -2", "min", [-2.0] * 30),
):
    for threshold_mode in ("rel", "abs"):
        seen[name, threshold_mode] = cuts(mode, metrics, threshold_mode=threshold_mode)
        count, best = seen[name, threshold_mode]
        print(f'{name}, mode="{mode}", threshold_mode="{threshold_mode}": {count} cuts, best {best:.4f}')
assert all(count == 7 for (_, mode), (count, _) in seen.items() if mode == "abs")
assert seen["constant +2", "rel"] == (7, 2.0)
for name in ("constant -2", "falling from -2", "constant loss of -2"):
    assert seen[name, "rel"][0] == 0, "the behaviour has changed"
assert seen["falling from -2", "rel"][1] == falling[-1], "the behaviour has changed"
PY
