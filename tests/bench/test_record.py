"""Every recorded figure has the same keys."""

from __future__ import annotations

import json
import sys

from conftest import ROOT

from listing import listing
from sparsellm.bench.record import Measurement, append, read

KEYS = ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]
KEYS += ["hardware", "commit", "date", "command"]


def test_appended_lines_have_exactly_the_agreed_keys(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    words = ["sparsellm", "bench", "loss", "--record", "somewhere", "--tokens", "5"]
    monkeypatch.setattr(sys, "argv", words)
    append([Measurement("loss", {"tokens": 5}, "fwd", 2.0, "ms", 4.0, 2.0)], path)
    append([Measurement("loss", {"tokens": 6}, "fwd", 3.0, "ms")], path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [list(line) for line in lines] == [KEYS, KEYS]
    assert lines[0]["command"] == "sparsellm bench loss --tokens 5"
    assert "| 6 | fwd | 3 | ms |  |  |" in listing(read(path))


def test_the_repositorys_records_are_whole():
    root = ROOT
    records = read(root / "benchmarks" / "results.jsonl")
    assert records
    for record in records:
        assert list(record) == KEYS
        assert isinstance(record["case"], dict)
