#!/bin/sh
# Question: polars counts the bytes of a corpus, `df["text"].str.len_bytes().sum()`, or its tokens,
#   `df["tokens"].list.len().sum()`. The corpus has 5 billion. What is the sum?
# Guess: 5 billion. Sums of counts have 64 bits, as in numpy and pyarrow.
# Seen (polars 2.1.0): 705,032,704. Lengths are UInt32, and a sum or cum_sum of UInt32 is UInt32: from 2^32 on it begins
#   at 0 again, without a message, also in group_by and in lazy frames. Of smaller types the sum has 64 bits, "to prevent
#   overflow issues", as the documentation says. Casting the lengths to Int64 first gives 5 billion. Wrong sums of UInt32
#   have been reported to polars' authors.
# Hurts: sizes and shares of corpora, weights of mixtures, numbers of steps of an epoch, and with cum_sum the offsets of
#   documents in a token file: small samples are right, real corpora are not.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile polars==2.1.0
fi
"$PYTHON" - <<'PY'
import polars as pl

text = pl.Series("text", ["x" * 10_000_000]).new_from_index(0, 500)  # the rows share their memory
frame = pl.DataFrame({"text": text, "source": ["web"] * 500})
lengths = text.str.len_bytes()
true = 500 * 10_000_000
seen = {
    "sum": lengths.sum(),
    "last of cum_sum": lengths.cum_sum()[-1],
    "group_by": frame.group_by("source").agg(pl.col("text").str.len_bytes().sum())["text"][0],
    "lazy, characters": frame.lazy().select(pl.col("text").str.len_chars().sum()).collect().item(),
    "cast to Int64": lengths.cast(pl.Int64).sum(),
}
for name, count in seen.items():
    print(f"{name}: {count:,} of {true:,} bytes")
tokens = pl.Series([[1, 2, 3]]).list.len()
print(f"lengths of texts are {lengths.dtype}, of lists {tokens.dtype}")
assert tokens.dtype == lengths.dtype == pl.UInt32
assert seen.pop("cast to Int64") == true
assert set(seen.values()) == {true - 2**32}, "the behaviour has changed"
PY
