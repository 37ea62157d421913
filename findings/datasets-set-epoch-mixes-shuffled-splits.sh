#!/bin/sh
# Question: the documentation of datasets says to shuffle a streamed dataset before it is split by take and skip:
#   `rows = dataset.shuffle(seed=42)`, `valid = rows.take(100)`, `train = rows.skip(100)`. Training calls
#   train.set_epoch(epoch), as it also says. Does train stay without the rows of valid?
# Guess: yes. The split is made once, and set_epoch only changes the order of what train holds.
# Seen (datasets 5.2.0): only in epoch 0. From epoch 1 on, set_epoch gives the shuffling below the split another seed:
#   train skips 100 other rows, and returns most of the validation rows. There is no warning. dataset.take(100) and
#   dataset.skip(100).shuffle(seed=42) stay apart.
# Hurts: runs of more than one epoch. Validation rows are trained on from the second epoch on, and the loss on them
#   stops to measure what it measured before.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datasets==5.2.0
fi
HF_HUB_OFFLINE=1 "$PYTHON" - "$dir" <<'PY'
import json
import sys
from pathlib import Path

from datasets import disable_progress_bars, load_dataset

disable_progress_bars()
folder = Path(sys.argv[1])
files = [folder / f"{shard}.jsonl" for shard in range(4)]
for shard, file in enumerate(files):
    file.write_text("\n".join(json.dumps({"id": 1000 * shard + i}) for i in range(1000)))
dataset = load_dataset("json", data_files=list(map(str, files)), split="train", streaming=True, cache_dir=str(folder))


def overlap(name, train, valid):
    """How many validation rows train returns in each of three epochs."""
    held_out = {row["id"] for row in valid}
    counts = []
    for epoch in range(3):
        train.set_epoch(epoch)
        rows = {row["id"] for row in train}
        assert len(rows) == 3900
        counts.append(len(held_out & rows))
    print(f"{name}: {counts} of 100 validation rows are in train, in epochs 0, 1 and 2")
    return counts


rows = dataset.shuffle(seed=42, buffer_size=1000)
before = overlap("shuffled before the split", rows.skip(100), rows.take(100))
after = overlap("shuffled after the split", dataset.skip(100).shuffle(seed=42, buffer_size=1000), dataset.take(100))
assert after == [0, 0, 0] and before[0] == 0
assert min(before[1:]) > 50, "the behaviour has changed"
PY
