#!/bin/sh
# Question: a streamed dataset is in its second epoch (set_epoch(1)) when its state_dict() is saved. A new process makes
#   the dataset again and calls load_state_dict. Where does it continue?
# Guess: at the next row of the second epoch. The state has an entry "epoch", and by its documentation, load_state_dict
#   continues exactly where the state was saved, except for shuffle buffers and one case of map.
# Seen (datasets 5.2.0): at the first row of epoch 0. load_state_dict does not set the epoch, and a state of another
#   epoch than the dataset's is ignored, without a message. In epoch 0, or if set_epoch(1) is called as well, resuming
#   is exact. The same holds with .shuffle(seed=…).
# Hurts: runs of more than one epoch. A resumed run reads the rows of this epoch again and never those that were left,
#   and a run that stops often sees the beginning of its data most. Save the epoch, and call set_epoch before iterating.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datasets==5.2.0
fi
"$PYTHON" - "$dir" <<'PY'
import json
import sys
from pathlib import Path

from datasets import disable_progress_bars, load_dataset

disable_progress_bars()
folder = Path(sys.argv[1])
files = [folder / f"{shard}.jsonl" for shard in range(4)]
for shard, file in enumerate(files):
    file.write_text("\n".join(json.dumps({"id": 1000 * shard + i}) for i in range(1000)))


def stream():
    return load_dataset("json", data_files=list(map(str, files)), split="train", streaming=True, cache_dir=str(folder))


def resumed(epoch, call_set_epoch):
    """Whether a new stream continues at row 1,500 of an epoch, after it has loaded the state."""
    dataset = stream()
    dataset.set_epoch(epoch)
    rows = iter(dataset)
    read = [next(rows)["id"] for _ in range(1500)]
    state = json.loads(json.dumps(dataset.state_dict()))
    rest = [row["id"] for row in rows]
    again = stream()
    again.load_state_dict(state)
    if call_set_epoch:
        again.set_epoch(epoch)
    rows = [row["id"] for row in again]
    print(f"epoch {epoch} (in the state: {state['epoch']}), set_epoch {'' if call_set_epoch else 'not '}called: "
          f"{len(set(rows) & set(read))} of the {len(read)} rows that were read come again; exact: {rows == rest}")
    return len(set(rows) & set(read)), rows == rest


assert resumed(0, False) == (0, True)
assert resumed(1, True) == (0, True)
assert resumed(1, False) == (1500, False), "the behaviour has changed"
PY
