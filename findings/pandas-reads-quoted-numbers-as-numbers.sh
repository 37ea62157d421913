#!/bin/sh
# Question: a JSONL file has the strings "0012", "012" and "12" as ids of three documents, or "007", "1.50" and "1e3" as
#   answers of a benchmark. What does pandas.read_json(file, lines=True) give?
# Guess: the strings. JSON says by its quotes what is a string; only CSV has to guess.
# Seen (pandas 3.1.1): numbers. A column whose strings all look like numbers is converted: the three ids become 12, 12 and
#   12, and the answers 7.0, 1.5 and 1000.0. Ids of 20 digits become floats, so that neighbours are equal; a hash such as
#   "1e400" becomes inf, and one of "0e12345" 0. If one string does not look like a number, all stay as they are, so that
#   the type depends on the rows: with chunksize, one chunk has strings and the next one numbers. dtype=False keeps
#   strings as they are. The documentation of dtype says that types are inferred, and gives no word on quotes.
# Hurts: joins and deduplication by id, which take different documents for one; answers that no longer equal the model's
#   "007"; hashes. to_json() has its own surprise: it writes ten decimals, so that a learning rate of 1e-11 becomes 0.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile pandas==3.1.1 numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import json
import sys
from pathlib import Path

import pandas as pd

print("pandas", pd.__version__)
file = Path(sys.argv[1]) / "rows.jsonl"


def read(values, **options):
    """The column of the given strings, as pandas reads it."""
    file.write_text("".join(json.dumps({"value": value}) + "\n" for value in values))
    return pd.read_json(file, lines=True, **options)


CASES = {
    "ids": (["0012", "012", "12"], [12, 12, 12]),
    "answers": (["007", "1.50", "1e3"], [7.0, 1.5, 1000.0]),
    "long ids": (["12345678901234567890123", "12345678901234567890124"], [1.2345678901234568e22] * 2),
    "hashes": (["1e400", "0e12345"], [float("inf"), 0.0]),
    "one word among them": (["0012", "012", "A12"], ["0012", "012", "A12"]),
}
for name, (values, expected) in CASES.items():
    seen, kept = read(values)["value"].tolist(), read(values, dtype=False)["value"].tolist()
    print(f"{name}: {values} become {seen}; with dtype=False {kept}")
    assert kept == values
    assert seen == expected, "the behaviour has changed"
chunks = [chunk["value"].tolist() for chunk in read(["A1", "0012", "0013", "0014"], chunksize=2)]
print("in chunks of two:", chunks)
assert chunks == [["A1", "0012"], [13, 14]], "the behaviour of chunks has changed"
written = pd.DataFrame({"rate": [1e-11, 1.23456789e-6]}).to_json(orient="records")
print("to_json of 1e-11 and 1.23456789e-6:", written)
assert json.loads(written)[0]["rate"] == 0, "to_json has changed"
PY
