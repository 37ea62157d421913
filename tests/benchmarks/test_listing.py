"""`make_tables.py --all`: newest of equal cases, and a row per case for the FFN benchmarks."""

from __future__ import annotations

import pytest

from listing import FFN_LEGEND, listing
from make_tables import main
from results import newest


def _record(bench: str, metric: str, value: float, commit: str = "c", **case: object) -> dict:
    record = {"bench": bench, "case": case, "metric": metric, "value": value, "unit": "ms"}
    record |= {"baseline": 4.0, "ratio": 4.0 / value, "hardware": "H", "commit": commit}
    return record | {"command": "sparsellm bench x"}


def test_the_newest_of_equal_cases_stands_where_the_first_stood():
    old, other = _record("loss", "a", 1.0, "old", t=1), _record("loss", "a", 2.0, t=2)
    new, elsewhere = _record("loss", "a", 3.0, "new", t=1), _record("loss", "a", 5.0, t=1)
    elsewhere["hardware"] = "another GPU"
    assert newest([old, other, new, elsewhere]) == [new, other, elsewhere]
    found = listing([old, other, new])
    assert "| 1 | a | 3 | ms | 4 | 1.333 | H | new |" in found
    assert "old" not in found


def test_ffn_cases_are_rows_in_order_and_metrics_columns():
    big = _record("ffn_forward", "ms", 2.0, M=16_384, pattern="uniform", nnz=30, union_64=7.0)
    small = _record("ffn_forward", "ms", 1.0, M=2048, pattern="trace", layer="mean", nnz=24.5)
    energy = _record("ffn_forward", "mJ", 8.0, "d", M=16_384, pattern="uniform", nnz=30)
    again = _record("ffn_forward", "ms", 1.6, M=16_384, pattern="uniform", nnz=30, union_64=7.1)
    first = _record("ffn_forward", "ms", 1.0, M=2048, pattern="trace", layer=0, nnz=24.5)
    lines = listing([big, small, energy, again, first]).splitlines()
    start = lines.index("## ffn_forward") + 2
    assert lines[start : start + 5] == [
        "| M | pattern | nnz | union_64 | layer | ms | mJ | hardware | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 2048 | trace | 24.5 |  | 0 | 1 (4.00× of 4) |  | H | c |",
        "| 2048 | trace | 24.5 |  | mean | 1 (4.00× of 4) |  | H | c |",
        "| 16,384 | uniform | 30 | 7.1 |  | 1.6 (2.50× of 4) | 8 (0.50× of 4) | H | c, d |",
    ]
    assert FFN_LEGEND.strip() in "\n".join(lines)


def test_the_script_lists_benchmarks_and_prints_one(capsys):
    main(["--all"])
    listed = capsys.readouterr().out
    assert "ffn_decode" in listed
    main(["--all", "loss"])
    printed = capsys.readouterr().out
    assert printed.startswith("## loss\n")
    assert "`sparsellm bench loss --tokens 8192`" in printed
    with pytest.raises(SystemExit, match="no such benchmark; did you mean 'ffn_decode'"):
        main(["--all", "ffn_decod"])
