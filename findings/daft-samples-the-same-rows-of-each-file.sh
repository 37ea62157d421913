#!/bin/sh
# Question: 300 Parquet files have four documents each. daft.read_parquet("*.parquet").sample(fraction=0.1, seed=0): how
#   many documents does it give, and which?
# Guess: about 120 of the 1,200, from all positions in the files.
# Seen (daft 0.7.26): 300, and they are the last of the four documents in each file. Each file is a part, each part is
#   sampled on its own with the same seed, and the number of rows is rounded up: 10% of four rows are one. With 20 files of
#   1,000 rows, the same 100 positions are taken from every file. Without a seed, the positions differ, but the number is
#   rounded up too. The documentation of sample() says neither.
# Hurts: samples for evaluation, quality labels or ablations, which are seeded so that they can be repeated. If the
#   documents of each file are sorted, such as by date, length or rank, the sample has the same ranks of every file, and
#   it has several times as many documents of small files as it should. Sample by a hash of the text or of an id.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile daft==0.7.26 pyarrow==25.0.1
fi
DO_NOT_TRACK=1 DAFT_ANALYTICS_ENABLED=0 DAFT_PROGRESS_BAR=0 "$PYTHON" - "$dir" <<'PY'
import sys
from collections import Counter
from pathlib import Path

import daft
import pyarrow as pa
import pyarrow.parquet as pq

print("daft", daft.__version__)


def write(name, files, rows):
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    for number in range(files):
        pq.write_table(pa.table({"position": range(rows)}), folder / f"{number:04}.parquet")
    return str(folder / "*.parquet")


def positions(files, **options):
    return Counter(daft.read_parquet(files).sample(**options).to_pydict()["position"])


small, large = write("small", 300, 4), write("large", 20, 1000)
for fraction in (0.1, 0.3):
    seeded, unseeded = positions(small, fraction=fraction, seed=0), positions(small, fraction=fraction)
    print(f"{fraction} of 300 files of 4 rows: {seeded.total()} rows, how many of each position: {dict(seeded)}")
    print(f"  without a seed: {unseeded.total()} rows, of each position: {dict(unseeded)}")
    assert seeded.total() == unseeded.total() > 1.5 * fraction * 1200, "the number of rows has changed"
    assert set(seeded.values()) == {300} and len(unseeded) == 4, "the seeds have changed"
seeded, unseeded = positions(large, fraction=0.1, seed=0), positions(large, fraction=0.1)
print(f"0.1 of 20 files of 1,000 rows: {len(seeded)} different positions; without a seed {len(unseeded)}")
assert len(seeded) == 100 and set(seeded.values()) == {20} and len(unseeded) > 800, "the seeds have changed"
PY
