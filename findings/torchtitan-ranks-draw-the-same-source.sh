#!/bin/sh
# Question: torchtitan mixes two sources of equal weight, InterleavedHuggingFaceTextDataLoader, on 8 data-parallel ranks
#   with a local batch of one row. What is in the global batch of a step?
# Guess: a mixture: 4 rows of each source on average, and all 8 of one source in one step of 128.
# Seen (torchtitan 0.3.0, datasets 4.7.0): 8 rows of one source, in every step. All ranks draw the source from a generator
#   with the same seed, 42, so that they take the same one at the same time. The rows differ. With a local batch of 4, the
#   global batch of 32 rows has the mixture of 4 draws: a quarter or three quarters of it are of one source in every second
#   step, and one source alone is in one of 8. The weights are right over the run. There is no message.
# Hurts: pretraining on mixtures with many ranks and small local batches: a step sees one or few sources, so that the noise
#   of the mixture does not fall with the number of ranks, and the loss jumps with the source.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torchtitan==0.3.0 torch==2.13.0 torchdata==0.11.0 datasets==4.7.0
fi
"$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import collections
import importlib.metadata
import itertools
import json
import logging
import sys
from pathlib import Path

from datasets import disable_progress_bars, load_dataset

logging.disable(logging.WARNING)
disable_progress_bars()

from torchtitan.hf_datasets import text_datasets as titan  # noqa: E402

RANKS, STEPS, ROWS = 8, 400, 20_000
folder = Path(sys.argv[1])


class Numbers:
    """A tokenizer of numbers: a row of seven gives eight inputs, the first of which is the BOS token."""

    eos_id = 1

    def encode(self, text, add_bos, add_eos):
        return [0] * add_bos + [2 + int(number) for number in text.split()] + [1] * add_eos


for source in range(2):
    file = folder / f"source{source}.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{source * ROWS + i} " * 7}) for i in range(ROWS)))
    titan.DATASETS[f"source{source}"] = titan.DatasetConfig(
        path=str(file),
        loader=lambda path: load_dataset("json", data_files=path, split="train", cache_dir=str(folder)),
        sample_processor=lambda row: row["text"],
    )


def batches(local_batch):
    """The row numbers of each global batch: those of all ranks. Rows from ROWS on are the second source's."""
    loaders = [
        titan.InterleavedHuggingFaceTextDataLoader(
            titan.InterleavedHuggingFaceTextDataLoader.Config(
                sources=[titan.HFDataSource(dataset=f"source{source}", weight=0.5) for source in range(2)]
            ),
            dp_world_size=RANKS, dp_rank=rank, tokenizer=Numbers(), seq_len=8, local_batch_size=local_batch,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    return [
        [int(row[1]) - 2 for batch, _ in step for row in batch["input"]]
        for step in itertools.islice(zip(*loaders), STEPS)
    ]


print("torchtitan", importlib.metadata.version("torchtitan"))
for local_batch in (1, 4):
    seen = batches(local_batch)
    rows = [row for batch in seen for row in batch]
    assert len(set(rows)) == len(rows) == STEPS * RANKS * local_batch, "a row is read twice"
    second = [sum(row >= ROWS for row in batch) for batch in seen]
    share = sum(second) / len(rows)
    counts = collections.Counter(second)
    shown = ", ".join(f"{count} in {steps}" for count, steps in sorted(counts.items()))
    print(f"local batch {local_batch}: rows of the second source: {share:.2f} of all; by steps: {shown}")
    assert 0.4 < share < 0.6
    assert set(counts) == {RANKS * draws for draws in range(local_batch + 1)}, "the behaviour has changed"
PY
