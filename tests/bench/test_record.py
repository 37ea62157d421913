"""Every recorded figure has the same keys, and is printed the same way."""

import json
import sys

import pytest

from results import RECORDS, read_records
from sparsellm.bench.record import Measurement, append, row

KEYS = ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]
SUSTAINED = ["sustained", "baseline_sustained"]  # not in older records
CONTEXT = ["hardware", "commit", "date", "command"]


def test_appended_lines_have_exactly_the_agreed_keys(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    words = ["sparsellm", "bench", "ffn", "--record", "somewhere", "--M", "5"]
    monkeypatch.setattr(sys, "argv", words)
    under = {"p10": 1.9, "p90": 2.1}
    append(
        [
            Measurement("ffn", {"M": 5}, "ms", 2.0, "ms", 4.0, 2.0, under, under | {"watts": 7.0}),
            Measurement("ffn", {"M": 6}, "ms", 3.0, "ms", context={"commit": "abc"}),
        ],
        path,
    )
    new, old = (json.loads(line) for line in path.read_text().splitlines())
    assert (list(new), list(old)) == (KEYS + SUSTAINED + CONTEXT, KEYS + CONTEXT)
    assert new["command"] == "sparsellm bench ffn --M 5"
    assert old["commit"] == "abc"
    assert [r["baseline_sustained"] for r in read_records(path)[:1]] == [under | {"watts": 7.0}]


@pytest.mark.parametrize(
    ("script", "program"),
    [
        ("/usr/bin/sparsellm", "sparsellm"),
        ("sparsellm/__main__.py", "sparsellm"),
        ("benchmarks/mixture_of_experts.py", "python benchmarks/mixture_of_experts.py"),
    ],
)
def test_a_line_has_the_command_that_measured_it(tmp_path, monkeypatch, script, program):
    monkeypatch.setattr(sys, "argv", [script, "a b", "--record", "somewhere", "--set", "x=1"])
    append([Measurement("ffn", {}, "ms", 2.0, "ms")], tmp_path / "results.jsonl")
    [line] = read_records(tmp_path / "results.jsonl")
    assert line["command"] == f"{program} 'a b' --set x=1"


def test_the_repositorys_records_are_whole():
    records = read_records(RECORDS)
    assert records
    for record in records:
        assert [key for key in record if key not in SUSTAINED] == KEYS + CONTEXT
        assert isinstance(record["case"], dict)


def test_a_case_is_printed_in_a_line():
    case = {"M": 16_384, "gated": True, "nnz": 25.9}
    under = {"p10": 0.99, "p90": 1.01, "watts": 699.6, "sm_mhz": 1500.0}
    measurements = [
        Measurement("ffn", case, "ms", 1.0, "ms", 1.5, 1.5, sustained=under),
        Measurement("ffn", case, "throughput", 12345678.4, "tokens/s"),
        Measurement("ffn", case, "share", 0.25, "of a step"),
    ]
    assert row(measurements) == (
        "ffn M=16,384 gated=True nnz=25.9: ms 1 (0.99 to 1.01; 700 W at 1,500 MHz; 1.50× of 1.5), "
        "throughput 12,345,678 tokens/s, share 0.25 of a step"
    )
