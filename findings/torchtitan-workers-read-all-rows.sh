#!/bin/sh
# Question: torchtitan's text data loader gets num_workers=4, "number of worker processes for data loading", to keep up
#   with the GPUs. What do the workers read?
# Guess: a quarter of the rows each, so that the run sees the same rows as with one process.
# Seen (torchtitan 0.3.0, datasets 4.7.0): all rows, each of them, if the dataset is one that load_dataset returns without
#   streaming=True. Every batch comes four times in a row, and an epoch has 4,000 rows instead of 1,000, without a
#   message. Streamed datasets are divided rightly. The loaders of chats and of interleaved sources repeat rows as well.
# Hurts: pretraining and fine-tuning with several workers: the run repeats each batch while it looks like one pass over the
#   data, sees a quarter of the data in the same steps, and its training loss is too low. num_workers=0, the default, is
#   right.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torchtitan==0.3.0 torch==2.13.0 torchdata==0.11.0 datasets==4.7.0
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import collections
import importlib.metadata
import json
import logging
import sys
from pathlib import Path

from datasets import disable_progress_bars, load_dataset

logging.disable(logging.WARNING)
disable_progress_bars()

from torchtitan.hf_datasets import text_datasets as titan  # noqa: E402

file = Path(sys.argv[1]) / "rows.jsonl"
file.write_text("\n".join(json.dumps({"text": f"{i} " * 7}) for i in range(1000)))


class Numbers:
    """A tokenizer of numbers: a row of seven gives eight inputs, the first of which is the BOS token."""

    eos_id = 1

    def encode(self, text, add_bos, add_eos):
        return [0] * add_bos + [2 + int(number) for number in text.split()] + [1] * add_eos


def rows(streaming, workers):
    """How often each row is read in one epoch."""
    titan.DATASETS["rows"] = titan.DatasetConfig(
        path=str(file),
        loader=lambda path: load_dataset(
            "json", data_files=path, split="train", streaming=streaming, cache_dir=str(file.parent)
        ),
        sample_processor=lambda row: row["text"],
    )
    config = titan.HuggingFaceTextDataLoader.Config(dataset="rows", infinite=False, num_workers=workers)
    options = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": Numbers(), "seq_len": 8, "local_batch_size": 4}
    first = [int(row[1]) - 2 for batch, _ in titan.HuggingFaceTextDataLoader(config, **options) for row in batch["input"]]
    return first


print("torchtitan", importlib.metadata.version("torchtitan"))
for streaming in (False, True):
    for workers in (0, 1, 2, 4):
        seen = rows(streaming, workers)
        counts = collections.Counter(seen)
        found = f"{len(seen):,} rows, {len(counts):,} different, first {seen[:8]}"
        print(f"streaming={streaming!s:5} num_workers={workers}: {found}")
        assert len(counts) == 1000
        expected = 1000 if streaming else 1000 * max(workers, 1)
        assert len(seen) == expected, "the behaviour has changed"
PY
