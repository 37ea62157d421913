#!/bin/sh
# Question: parameter groups have learning rates of their own, and the schedule is transformers' cosine_with_min_lr with
#   min_lr=3e-5. At which rates does training end?
# Guess: at 3e-5 in every group.
# Seen (transformers 5.23.0): at min_lr divided by the optimizer's default rate, times the group's own. Groups with
#   rates of 1e-2, 3e-4 and 3e-5 in an AdamW without `lr` (default: 1e-3) end at 3e-4, 9e-6 and 9e-7. A single group of
#   3e-4 also ends at 9e-6. Only groups at the optimizer's default rate end at min_lr; cosine_warmup_with_min_lr does
#   the same.
# Hurts: groups by kind of parameter (embeddings, matrices, muP), the way in which such rates are usually given. The end
#   of the schedule runs at rates that no setting names.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - <<'PY'
import torch
from transformers import get_scheduler


def last_rates(rates, **default):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.AdamW(groups, **default)
    schedule = get_scheduler(
        "cosine_with_min_lr", optimizer, num_warmup_steps=10, num_training_steps=100,
        scheduler_specific_kwargs={"min_lr": 3e-5},
    )
    for _ in range(100):
        optimizer.step()
        schedule.step()
    return [float(f"{rate:.3g}") for rate in schedule.get_last_lr()]


cases = {
    "groups": last_rates([1e-2, 3e-4, 3e-5]),
    "one group": last_rates([3e-4]),
    "one group, lr=3e-4 as the default too": last_rates([3e-4], lr=3e-4),
}
for name, rates in cases.items():
    print(f"{name}: min_lr 3e-5, last rates {rates}")
seen = list(cases.values())
assert seen[2] == [3e-5]
assert seen[:2] == [[3e-4, 9e-6, 9e-7], [9e-6]], "the behaviour has changed"
PY
