#!/bin/sh
# Question: a streamed dataset is to be read for several epochs in one loop, dataset.shuffle(seed=0).repeat(3), as in
#   tf.data and grain. Is it in another order in each epoch?
# Guess: yes, as in tf.data, whose shuffle does so by default, and in grain; datasets shuffles by seed and epoch as well.
# Seen (datasets 5.2.0): no. Shards and rows come in the order of the first epoch, three times, and set_epoch(1) makes it
#   another order, which is again repeated. shuffle after repeat mixes the repetitions: a row comes again before others
#   were read once. With a loop over epochs and set_epoch(epoch) instead of repeat, each epoch has an order of its own.
# Hurts: training for several epochs by steps, with repeat as the only loop: each batch is made of the same rows in every
#   epoch, and a shard that was last is last again.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datasets==5.2.0 grain==0.2.18
fi
HF_HOME="$dir/cache" "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { cat "$dir/log"; exit 1; }
import importlib.metadata

import datasets
import grain

ROWS = 1000


def stream():
    return datasets.Dataset.from_dict({"row": range(ROWS)}).to_iterable_dataset(num_shards=10)


def epochs(dataset):
    rows = [row["row"] for row in dataset]
    parts = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    whole = [len(set(part)) == ROWS for part in parts]
    same = [part == parts[0] for part in parts]
    print(f"the first rows {[part[:4] for part in parts]}, each row once {whole}, as in the first epoch {same}")
    return parts, whole, same


print("datasets", datasets.__version__, "grain", importlib.metadata.version("grain"))
repeated = stream().shuffle(seed=0, buffer_size=100).repeat(3)
first, whole, same = epochs(repeated)
assert all(whole)
assert same == [True, True, True], "the behaviour has changed"
repeated.set_epoch(1)
second, _, same = epochs(repeated)
assert second[0] != first[0] and all(same), "the behaviour has changed"
_, whole, _ = epochs(stream().repeat(3).shuffle(seed=0, buffer_size=100))
assert not all(whole)
in_grain = [int(row) for row in grain.MapDataset.range(ROWS).shuffle(seed=0).repeat(3)]
assert in_grain[:ROWS] != in_grain[ROWS : 2 * ROWS]
shuffled = stream().shuffle(seed=0, buffer_size=100)
orders = []
for epoch in range(2):
    shuffled.set_epoch(epoch)
    orders.append([row["row"] for row in shuffled])
assert orders[0] != orders[1]
PY
