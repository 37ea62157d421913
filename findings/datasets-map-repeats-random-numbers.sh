#!/bin/sh
# Question: dataset.map(augment, num_proc=4) draws random numbers from numpy or torch in augment, to mask tokens, sample
#   rows or shuffle choices. Do the four processes draw different numbers?
# Guess: yes, as the workers of torch's DataLoader do, which get a seed each.
# Seen (datasets 5.2.0, Linux): no. The processes are forks, each with a copy of the state of numpy's and torch's
#   generators, so the rows of each quarter get the numbers of the first quarter. Python's own random differs, since
#   multiprocessing seeds it anew, and so is not reproducible. With one process, every row gets its own numbers.
# Hurts: random masks, prompts, samples and splits made with num_proc: there is only a quarter as much randomness, and
#   the same rows are chosen in each quarter. Draw from a generator seeded by the row's index (with_indices=True).
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datasets==5.2.0 numpy==2.4.6 torch==2.13.0
fi
"$PYTHON" - <<'PY'
import random

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars

disable_progress_bars()


def draw(row):
    return {"numpy": np.random.rand(), "torch": torch.rand(()).item(), "random": random.random()}


rows = Dataset.from_dict({"row": list(range(1000))})
different = {}
for processes in (1, 4):
    np.random.seed(0), torch.manual_seed(0), random.seed(0)
    drawn = rows.map(draw, num_proc=processes, load_from_cache_file=False)
    different[processes] = {name: len(set(drawn[name])) for name in ("numpy", "torch", "random")}
    print(f"num_proc={processes}: different numbers among 1,000 rows: {different[processes]}")
    print("  rows 0, 250, 500, 750:", [round(drawn["numpy"][i], 4) for i in (0, 250, 500, 750)])
assert min(different[1].values()) == 1000
assert different[4]["numpy"] == different[4]["torch"] == 250, "the behaviour has changed"
PY
