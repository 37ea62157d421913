#!/bin/sh
# Question: a Parquet file of pyarrow or polars has the loss of each document, and a few are NaN. DuckDB computes the mean
#   of the others: select avg(loss) from 'file.parquet' where not isnan(loss). What is it?
# Guess: the mean of the others, as for a table in memory. Statistics of a file only make queries faster.
# Seen (duckdb 2.0.1, pyarrow 26.0.1, polars 2.1.0): NaN. isnan(loss) is false in all rows. The smallest and largest number
#   in the file's statistics leave out NaN, as the format asks for, and DuckDB concludes that there is none. `loss > 1`
#   finds nothing either, while NaN is above all numbers in DuckDB's order, and `loss > 0.9` returns the NaN or not,
#   depending on the size of row groups. max(loss) is not NaN for pyarrow's files. Tables in memory, files of DuckDB and
#   files without statistics are right, and so is isfinite(loss).
# Hurts: checks of data, scores and logs for NaN, which say that there is none; and counts by a threshold, which depend on
#   how a file was written.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile duckdb==2.0.1 pyarrow==26.0.1 polars==2.1.0 numpy==2.4.6
fi
cd "$dir"
"$PYTHON" - <<'PY'
import math

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

values = np.random.default_rng(0).random(30_000).astype(np.float32)
values[:20_000] *= 0.8
values[[10, 10_005]] = np.nan
losses = pa.table({"loss": values})
pq.write_table(losses, "pyarrow.parquet")
pq.write_table(losses, "pyarrow-small-groups.parquet", row_group_size=1_000)
pq.write_table(losses, "pyarrow-without-statistics.parquet", write_statistics=False)
pl.from_arrow(losses).write_parquet("polars.parquet")
duckdb.sql("copy (select * from losses) to 'duckdb.parquet'")
true = int((values > 0.9).sum())
print(f"2 of 30,000 losses are NaN, and {true} are above 0.9; the mean of the others is {np.nanmean(values):.4f}")


def ask(source):
    queries = ("count(*) from {} where isnan(loss)", "count(*) from {} where loss > 0.9", "max(loss) from {}",
               "avg(loss) from {} where not isnan(loss)", "avg(loss) from {} where isfinite(loss)")
    return [duckdb.sql("select " + query.format(source)).fetchall()[0][0] for query in queries]


names = ("pyarrow", "pyarrow-small-groups", "pyarrow-without-statistics", "polars", "duckdb")
seen = {name: ask(f"'{name}.parquet'") for name in names} | {"in memory": ask("losses")}
for name, (nan, above, largest, mean, finite) in seen.items():
    print(f"{name}: isnan finds {nan}, loss > 0.9 finds {above}, max {largest:.5f}, avg where not isnan {mean:.4f}, "
          f"avg where isfinite {finite:.4f}")
    assert abs(finite - np.nanmean(values)) < 1e-4
for name in ("in memory", "duckdb", "pyarrow-without-statistics"):
    assert seen[name][:2] == [2, true + 2] and abs(seen[name][3] - np.nanmean(values)) < 1e-4
for name in ("pyarrow", "pyarrow-small-groups", "polars"):
    assert seen[name][0] == 0 and math.isnan(seen[name][3]), "the behaviour has changed"
assert seen["pyarrow"][1] == true + 2 and seen["pyarrow-small-groups"][1] == true, "the behaviour has changed"
PY
