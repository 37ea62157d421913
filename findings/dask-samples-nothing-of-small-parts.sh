#!/bin/sh
# Question: a corpus of 1,200 documents in 300 Parquet files of four each. dask.dataframe.read_parquet(folder)
#   .sample(frac=0.1, random_state=0): how many documents does it give?
# Guess: about 120, some from this file and some from that.
# Seen (dask 2026.8.0, pandas 3.1.1): none. Each part is sampled on its own, and the number of its rows is rounded: 10% of
#   four, or of five, are 0, while 30% of four are one, that is 25%. If a corpus has 300 small files and two of 5,000
#   documents, a sample of 10% comes from the two large files only. The documentation says that the number is approximate
#   and "should be pretty close in practice". random_split([0.1, 0.9]) draws row by row, and gives about 10% of all.
# Hurts: held-out sets, samples for quality labels and ablations: sources in small files, such as one file per book, site
#   or language, are not in them at all.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile 'dask[dataframe]==2026.8.0' pandas==3.1.1 pyarrow==25.0.1 numpy==2.4.6
fi
"$PYTHON" - "$dir" <<'PY'
import sys
from pathlib import Path

import dask
import dask.dataframe as dd
import pandas as pd

print("dask", dask.__version__, "pandas", pd.__version__)


def read(name, **files):
    """A corpus whose files have the given numbers of documents, by source."""
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    for source, sizes in files.items():
        for number, size in enumerate(sizes):
            pd.DataFrame({"source": [source] * size}).to_parquet(folder / f"{source}{number:04}.parquet")
    return dd.read_parquet(folder)


def count(frame):
    return frame.compute()["source"].value_counts().to_dict()


for size in (4, 5, 6):
    corpus = read(f"files{size}", books=[size] * 300)
    counts = {share: len(corpus.sample(frac=share, random_state=0).compute()) for share in (0.1, 0.3)}
    print(f"300 files of {size}: 10% are {counts[0.1]}, 30% are {counts[0.3]} of {300 * size}")
    assert counts[0.1] == (0 if size < 6 else 300), "the behaviour has changed"
mixed = read("mixed", books=[4] * 300, web=[5000] * 2)
sampled, split = count(mixed.sample(frac=0.1, random_state=0)), count(mixed.random_split([0.1, 0.9], random_state=0)[0])
print(f"1,200 books and 10,000 pages: sample {sampled}, random_split {split}")
assert sampled == {"web": 1000}, "the behaviour has changed"
PY
