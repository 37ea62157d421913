#!/bin/sh
# Question: MosaicML's StreamingDataLoader has a collate_fn that packs documents: of 8 samples, it makes 2 rows. The run
#   saves loader.state_dict() after 10 batches, and a new process loads it. At which sample does it go on?
# Guess: at the 81st, as the run would have without the interruption.
# Seen (mosaicml-streaming 0.13.0): at the 21st. The loader counts the samples that have been read by the length of the
#   batch: of the first value of a dictionary, of a tensor, or of the first entry of a list. It sees 2 rows and counts 2
#   samples, so that 60 samples are read twice. If the first entry is longer than the number of samples, such as cu_seqlens,
#   which has one more, samples are skipped. There is no message. For batches with one row per sample the state is exact.
# Hurts: runs on packed or cut sequences that resume in the middle of an epoch: they see their first data again, or leave
#   some out, after every restart. Put an entry with one element per sample first into the dictionary.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile mosaicml-streaming==0.13.0 transformers==4.57.6 torch==2.14.1 \
    torchvision==0.29.1
fi
cat > "$dir/resume.py" <<'PY'
import importlib.metadata
import sys

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

print("mosaicml-streaming", importlib.metadata.version("mosaicml-streaming"))
with MDSWriter(out=sys.argv[1], columns={"tokens": "ndarray:int32"}) as writer:
    for number in range(800):
        writer.write({"tokens": np.full(64, number, np.int32)})


def rows(samples):  # one row per sample
    return {"tokens": torch.tensor(np.stack([sample["tokens"] for sample in samples]))}


def packed(samples):  # two rows of four samples each
    return {"tokens": rows(samples)["tokens"].reshape(2, -1)}


def flat(samples):  # all samples in one row, and where they begin
    return {"cu_seqlens": torch.arange(len(samples) + 1) * 64, "tokens": rows(samples)["tokens"].flatten()}


def fixed(samples):
    return {"count": torch.arange(len(samples)), **packed(samples)}


def loader(collate):
    dataset = StreamingDataset(local=sys.argv[1], shuffle=True, batch_size=8, shuffle_seed=1)
    return StreamingDataLoader(dataset, batch_size=8, collate_fn=collate)


def numbers(batch):
    return set(batch["tokens"].flatten().tolist())


for collate, position in ((rows, 80), (fixed, 80), (packed, 20), (flat, 90)):
    before, run = [], loader(collate)
    for batch in run:
        before.append(numbers(batch))
        if len(before) == 10:
            break
    state = run.state_dict()
    resumed = loader(collate)
    resumed.load_state_dict(state)
    before, after = set().union(*before), set().union(*map(numbers, resumed))
    print(f"{collate.__name__}: 80 samples read, the state says {state['sample_in_epoch']}; "
          f"{len(before & after)} are read again, {800 - len(before | after)} never")
    assert state["sample_in_epoch"] == position, "the behaviour has changed"
PY
"$PYTHON" -W ignore "$dir/resume.py" "$dir/data"
