#!/bin/sh
# Question: a streamed dataset is split by `valid = dataset.take(100)` and `train = dataset.skip(100)`. Training reads
#   with two workers of a DataLoader, or on two nodes with split_dataset_by_node; validation reads in one process. Do
#   the two have rows in common?
# Guess: none. take and skip mean the first 100 rows of the dataset, whoever reads them.
# Seen (datasets 5.2.0, torch 2.13.0): 50 of the 100 validation rows are trained on. Each of N workers or nodes skips
#   100 / N rows of its own shards, and takes as many. So `valid` is other rows too when it is read by workers. There is
#   no warning. With the same number of workers on both sides, or one shard, the two have nothing in common.
# Hurts: held-out losses of pretraining on streams: validation rows are seen in training, and the losses of runs with
#   different numbers of workers or nodes are of different rows. Hold out files instead.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 datasets==5.2.0
fi
HF_HUB_OFFLINE=1 "$PYTHON" - "$dir" <<'PY'
import json
import sys
from pathlib import Path

from datasets import disable_progress_bars, load_dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

disable_progress_bars()
folder = Path(sys.argv[1])
files = [folder / f"{shard}.jsonl" for shard in range(4)]
for shard, file in enumerate(files):
    file.write_text("\n".join(json.dumps({"id": 1000 * shard + i}) for i in range(1000)))
dataset = load_dataset("json", data_files=list(map(str, files)), split="train", streaming=True, cache_dir=str(folder))
train, valid = dataset.skip(100), dataset.take(100)


def ids(rows, workers=0):
    return {int(row["id"]) for row in DataLoader(rows, batch_size=None, num_workers=workers)}


def on_nodes(rows, nodes):
    return set().union(*(ids(split_dataset_by_node(rows, rank, nodes)) for rank in range(nodes)))


held_out = ids(valid)
assert held_out == set(range(100))
common = {
    "train read by 0 workers": held_out & ids(train),
    "train read by 2 workers": held_out & ids(train, 2),
    "train read on 2 nodes": held_out & on_nodes(train, 2),
    "valid read by 2 workers": held_out & ids(valid, 2),
}
for name, rows in common.items():
    print(f"{name}: {len(rows)} rows in common with the first 100")
assert not ids(valid, 2) & ids(train, 2)
assert list(map(len, common.values())) == [0, 50, 50, 50], "the behaviour has changed"
PY
