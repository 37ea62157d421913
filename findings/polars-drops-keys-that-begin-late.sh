#!/bin/sh
# Question: polars reads a JSON-lines file with pl.read_ndjson or scan_ndjson. From row 5,000 on, rows have a further
#   key, "lang". What is in the column "lang"?
# Guess: the values, with nulls before them, or an error that says that the schema does not fit.
# Seen (polars 2.1.0): there is no such column. The columns are those of the first 100 rows (infer_schema_length), and
#   keys that begin later are dropped without a message, inside of nested objects too. A value that does not fit the
#   type of the first 100 rows is an error. infer_schema_length=None keeps all keys. The documentation calls the
#   number the rows that are scanned for the schema, and does not say what becomes of the others' keys.
# Hurts: corpora joined from several sources, whose metadata differ: licence, language or quality scores of all sources
#   but the first are gone. A file that is read, filtered and written again has lost them for good.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile polars==2.1.0
fi
"$PYTHON" - "$dir" <<'PY'
import json
import sys

import polars as pl

path = f"{sys.argv[1]}/rows.jsonl"
with open(path, "w") as file:
    for i in range(10_000):
        late = {"lang": "en", "meta": {"source": "b", "licence": "mit"}} if i >= 5000 else {"meta": {"source": "a"}}
        file.write(json.dumps({"text": f"document {i}"} | late) + "\n")
frames = {
    "read_ndjson": pl.read_ndjson(path),
    "scan_ndjson": pl.scan_ndjson(path).collect(),
    "read_ndjson, infer_schema_length=None": pl.read_ndjson(path, infer_schema_length=None),
}
for name, frame in frames.items():
    print(f"{name}: {len(frame):,} rows, columns {sorted(frame.columns)}, last meta {frame['meta'][-1]}")
whole = frames.pop("read_ndjson, infer_schema_length=None")
assert whole["lang"].null_count() == 5000 and whole["meta"][-1] == {"source": "b", "licence": "mit"}
for frame in frames.values():
    assert len(frame) == 10_000 and "lang" not in frame.columns, "the behaviour has changed"
    assert frame["meta"][-1] == {"source": "b"}, "the behaviour of nested keys has changed"
PY
