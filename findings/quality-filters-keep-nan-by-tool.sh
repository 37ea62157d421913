#!/bin/sh
# Question: a Parquet file has a quality score for each document, and some are NaN, since a model or a division failed.
#   Which tools keep these documents under the filter score >= 0.8?
# Guess: none. A comparison with NaN is false, as in NumPy, pandas and the standard of floating-point numbers.
# Seen (polars 2.1.0, duckdb 2.0.1, daft 0.7.26, pylance 14.0.2, datafusion 55.0.0, vortex-data 0.93.0, pandas 3.1.1,
#   pyarrow 25.0.1, dask 2026.8.0): six of nine. Polars, DuckDB, Daft, Lance, DataFusion and Vortex order all numbers,
#   with NaN above infinity, so that it is at least 0.8; pandas, PyArrow and Dask drop it. With score <= 0.2 all agree. So
#   a filter that keeps the good documents keeps the broken ones in six tools, and the same filter turned around, such as
#   1 - score <= 0.2, drops them. Daft and Vortex also take -0.0 for less than 0.0: score = 0 finds the one and not the
#   other. The documentation of Polars and DuckDB says that NaN is the largest number.
# Hurts: pipelines that are moved to a faster tool, or that filter in one and count in another: documents without a valid
#   score are kept as the best. Write NOT isnan(score), or fill NaN, before any filter.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile polars==2.1.0 duckdb==2.0.1 daft==0.7.26 pylance==14.0.2 \
    datafusion==55.0.0 vortex-data==0.93.0 pandas==3.1.1 pyarrow==25.0.1 'dask[dataframe]==2026.8.0' numpy==2.4.6
fi
DAFT_PROGRESS_BAR=0 DO_NOT_TRACK=1 "$PYTHON" -W ignore - "$dir" <<'PY'
import operator
import sys

import daft
import dask.dataframe as dd
import datafusion
import duckdb
import lance
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import vortex
import vortex.expr

file = f"{sys.argv[1]}/scores"
table = pa.table({"score": [0.1, 0.9, float("nan"), -0.0, 0.0]})
pq.write_table(table, file + ".parquet")
lance.write_dataset(table, file + ".lance")
vortex.io.write(vortex.array(table), file + ".vortex")
context = datafusion.SessionContext()
context.register_parquet("scores", file + ".parquet")
TOOLS = {  # name: a function of the filter in SQL, and as a function of a column
    "pandas": lambda sql, keep: pd.read_parquet(file + ".parquet").pipe(lambda rows: rows[keep(rows["score"])]),
    "pyarrow": lambda sql, keep: pa.dataset.dataset(file + ".parquet").to_table(filter=keep(pa.dataset.field("score"))),
    "dask": lambda sql, keep: dd.read_parquet(file + ".parquet").pipe(lambda rows: rows[keep(rows["score"])]).compute(),
    "polars": lambda sql, keep: pl.scan_parquet(file + ".parquet").filter(keep(pl.col("score"))).collect(),
    "duckdb": lambda sql, keep: duckdb.sql(f"SELECT * FROM '{file}.parquet' WHERE {sql}").arrow().read_all(),
    "daft": lambda sql, keep: daft.read_parquet(file + ".parquet").where(keep(daft.col("score"))).to_arrow(),
    "lance": lambda sql, keep: lance.dataset(file + ".lance").to_table(filter=sql),
    "datafusion": lambda sql, keep: context.sql(f"SELECT * FROM scores WHERE {sql}").to_arrow_table(),
    "vortex": lambda sql, keep: vortex.open(file + ".vortex").scan(expr=keep(vortex.expr.column("score"))).read_all()
    .to_arrow_table(),
}
KEEP_NAN = {"polars", "duckdb", "daft", "lance", "datafusion", "vortex"}
for symbol, compare, number in ((">=", operator.ge, 0.8), ("<=", operator.le, 0.2), ("=", operator.eq, 0.0)):
    kept = {}
    for name, read in TOOLS.items():
        rows = read(f"score {symbol} {number}", lambda column: compare(column, number))
        kept[name] = [float(score) for score in rows["score"].to_numpy()]
    print(f"score {symbol} {number}:", kept)
    if symbol == ">=":
        assert {name for name, scores in kept.items() if len(scores) == 2} == KEEP_NAN, "the behaviour has changed"
    if symbol == "=":
        assert {name for name, scores in kept.items() if len(scores) == 1} == {"daft", "vortex"}, "zeros have changed"
PY
