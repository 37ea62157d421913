#!/bin/sh
# Question: a table has a column of token lists, and is read in batches, `for batch in table.to_batches(1000)`. Does
#   batch["tokens"].values have the tokens of the batch?
# Guess: yes, without the boundaries of the lists.
# Seen (pyarrow 26.0.1): no. Batches are slices of the same memory, and .values ignores the slice: every batch gives the
#   tokens of all rows of its chunk. The same holds for pyarrow.dataset's to_batches and for lists of fixed size.
#   .flatten() gives the tokens of the batch. Batches of ParquetFile.iter_batches are right, so that the same code is
#   right there. The documentation of .values says so; nothing does when it runs.
# Hurts: readers of tokenised data: with N batches a chunk, every token is read N times, and the counts of tokens are N
#   times too large. Training goes on, on N times as many epochs as it seems.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile pyarrow==26.0.1
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

rows = [[row, row] for row in range(10)]
seen = {}
for kind in (pa.list_(pa.uint16()), pa.list_(pa.uint16(), 2)):
    table, file = pa.table({"tokens": pa.array(rows, kind)}), f"{sys.argv[1]}/rows.parquet"
    pq.write_table(table, file)
    readers = {
        "table.to_batches": table.to_batches(5),
        "dataset.to_batches": pyarrow.dataset.dataset(file).to_batches(batch_size=5),
        "ParquetFile.iter_batches": pq.ParquetFile(file).iter_batches(5),
    }
    for name, batches in readers.items():
        columns = [batch["tokens"] for batch in batches]
        values, flat = (sum(len(part(c)) for c in columns) for part in (lambda c: c.values, lambda c: c.flatten()))
        seen[str(kind), name] = values
        print(f"{kind}, {name}: 20 tokens, {len(columns)} batches, by .values {values}, by .flatten() {flat}")
        assert flat == 20 and len(columns) == 2
lists = str(pa.list_(pa.uint16()))
assert seen[lists, "ParquetFile.iter_batches"] == 20
assert seen[lists, "table.to_batches"] == seen[lists, "dataset.to_batches"] == 40, "the behaviour has changed"
PY
