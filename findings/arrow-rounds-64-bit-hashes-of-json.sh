#!/bin/sh
# Question: a JSON-lines file has the 64-bit hash of each document, as an unsigned integer. What does load_dataset("json")
#   of datasets, or pyarrow.json, make of it?
# Guess: uint64 or int64 with the exact numbers, or an error. Both parse integers exactly.
# Seen (pyarrow 26.0.1, datasets 5.2.0): float64. A hash above 2^63 turns the whole column into floats, without a warning,
#   and all hashes are rounded to 53 bits: those of near documents become one. Of 100,000 hashes, 99.7% change. With
#   features that say uint64, datasets raises an error. If all hashes are below 2^63, the column is int64 and exact,
#   so a small sample may be right. pandas' and polars' readers are exact.
# Hurts: joins with the hashes of another tool find nothing, and removal of duplicates by hash. The same file gives another
#   dtype for another sample. Store hashes as strings, or as signed integers.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 polars==2.1.0 numpy==2.4.6
fi
cd "$dir"
HF_HOME="$dir/hf" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$PYTHON" - <<'PY'
import json
import random
import warnings

import datasets
import pandas as pd
import polars as pl
import pyarrow.json

warnings.simplefilter("error")
generator = random.Random(0)
hashes = [generator.getrandbits(64) for _ in range(100_000)]
hashes[1] = (hashes[0] | 1 << 63) ^ 1
hashes[0] |= 1 << 63


def read(numbers, name):
    with open(name, "w") as file:
        file.writelines(json.dumps({"hash": number, "text": "a"}) + "\n" for number in numbers)
    dataset = datasets.load_dataset("json", data_files=name, split="train")
    arrow = pyarrow.json.read_json(name)["hash"]
    print(f"{name}: datasets makes {dataset.features['hash'].dtype}, pyarrow {arrow.type}")
    return {
        "datasets": dataset["hash"][:],
        "pyarrow": arrow.to_pylist(),
        "pandas": pd.read_json(name, lines=True)["hash"].tolist(),
        "polars": pl.read_ndjson(name)["hash"].to_list(),
    }


for name, numbers in {"below-2-to-63.jsonl": [number >> 1 for number in hashes], "64-bits.jsonl": hashes}.items():
    wrong = {}
    for reader, column in read(numbers, name).items():
        wrong[reader] = sum(int(a) != b for a, b in zip(column, numbers, strict=True)) / len(numbers)
        equal = column[0] == column[1]
        print(f"  {reader}: {wrong[reader]:.1%} of the hashes are wrong; the first two are equal: {equal}")
    if numbers is not hashes:
        assert not any(wrong.values())
assert wrong["pandas"] == wrong["polars"] == 0
assert wrong["datasets"] > 0.9 and wrong["pyarrow"] > 0.9, "the behaviour has changed"
PY
