#!/bin/sh
# Question: polars sums a column of fp32 by group, `frame.group_by("source").agg(pl.col("loss").sum())`. A group has 40
#   million rows. Is the sum right, up to the rounding of fp32?
# Guess: yes. The sum of the whole column is right, and so are the means of groups.
# Seen (polars 2.1.0): of 40 million ones it is 16,777,216 with one thread, and of losses around 10.5 it is 64% of the
#   true sum. Each thread adds its rows of a group one by one in fp32, so the sum depends on the number of threads: with
#   two, losses come out 6% too large. So in lazy frames, in the streaming engine and in sink_parquet. sum().over(…) is as
#   wrong in the streaming engine and right in memory. If the deviation of the column is asked for too, the same sum is
#   right in memory, since polars then computes it in another way, with compensation. Means of groups are right.
# Hurts: totals by source or language: token counts and weights as fp32, losses, and means that are computed as a ratio of
#   two sums. Cast to Float64 first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile polars==2.1.0 numpy==2.4.6
fi
cd "$dir"
cat > sums.py <<'PY'
import numpy as np
import polars as pl

rows = 40_000_000
loss = np.random.default_rng(0).random(rows, dtype=np.float32) + 10
frame = pl.DataFrame({"source": np.zeros(rows, np.int8), "one": np.ones(rows, np.float32), "loss": loss}).lazy()
true = {"one": rows, "loss": loss.sum(dtype=np.float64)}
one, loss = pl.col("one"), pl.col("loss")


def by_source(*columns):
    return frame.group_by("source").agg(*columns)


print("threads:", pl.thread_pool_size())
by_source(one.sum(), loss.sum()).sink_parquet("sums.parquet")
results = {
    "whole column": frame.select(one.sum(), loss.sum()).collect(),
    "groups, Float64": by_source(one.cast(pl.Float64).sum(), loss.cast(pl.Float64).sum()).collect(),
    "groups": frame.collect().group_by("source").agg(one.sum(), loss.sum()),
    "groups, streaming": by_source(one.sum(), loss.sum()).collect(engine="streaming"),
    "groups, sink_parquet": pl.read_parquet("sums.parquet"),
    "groups, with a deviation": by_source(one.sum(), loss.sum(), loss.std().alias("std")).collect(engine="in-memory"),
    "over, in memory": frame.select(one.sum().over("source"), loss.sum().over("source")).collect(engine="in-memory"),
}
ratios = {}
for name, table in results.items():
    ratios[name] = [table[column][0] / true[column] for column in true]
    print(f"{name}: ones {table['one'][0]:,.0f}, losses {ratios[name][1]:.4f} of the true sum")
sums_over = frame.select(one.sum().over("source"), loss.sum().over("source")).collect(engine="streaming")
ratios["over, streaming"] = [sums_over[column][0] / true[column] for column in true]
print(f"over, streaming: losses {ratios['over, streaming'][1]:.4f} of the true sum")
means = by_source(one.mean(), loss.mean()).collect(engine="streaming")
assert abs(means["loss"][0] * rows / true["loss"] - 1) < 1e-5 and means["one"][0] == 1
wrong = ["groups", "groups, streaming", "groups, sink_parquet", "over, streaming"]
for name in ratios.keys() - set(wrong):
    assert all(abs(ratio - 1) < 1e-5 for ratio in ratios[name]), name
for name in wrong:
    assert abs(ratios[name][1] - 1) > 0.01, "the behaviour has changed"
    if pl.thread_pool_size() == 1 and name in results:
        assert results[name]["one"][0] == 2**24 and abs(ratios[name][1] - 0.64) < 0.01, "the behaviour has changed"
PY
POLARS_MAX_THREADS=1 "$PYTHON" sums.py
POLARS_MAX_THREADS=2 "$PYTHON" sums.py
