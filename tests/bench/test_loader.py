"""The loader's benchmark: a figure for a figure, one line for a mistake."""

from __future__ import annotations

import pytest

from sparsellm.cli import main

SHORT = ["--context-length", "16", "--micro-batch-size", "2", "--seconds", "0.1"]


def _bench(*arguments):
    own = ["--tokenizer", "bytes", "--num-workers", "0"]  # nothing is downloaded
    return main(["bench", "loader", *own, *SHORT, *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "nope"], "corpus 'nope': no such file"),
        (["--corpus", "local", "--files", "/nope"], "data.files: /nope does not exist; correct"),
        (["--corpus", "local", "--files", "/no*"], "data.files: ['/no*'] match no file"),
        (["--num-workers", "-1"], "--num-workers -1: give 0"),
    ],
)
def test_mistakes_are_one_line_before_any_rank_starts(capfd, arguments, message):
    assert _bench(*arguments) == 1
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_no_ranks_are_refused(capsys):
    with pytest.raises(SystemExit):
        _bench("--num-ranks", "0")
    assert (
        "argument --num-ranks: '0' is not a whole number of at least 1" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_what_a_rank_met_is_one_line_too_and_ends_the_others(capfd, tmp_path):
    (tmp_path / "good.jsonl").write_text('{"text": "fine"}\n' * 100)
    (tmp_path / "bad.jsonl").write_text("{oops\n")
    files = [str(tmp_path / name) for name in ("good.jsonl", "bad.jsonl")]
    options = ["--corpus", "local", "--files", *files, "--num-ranks", "2", "--num-workers", "1"]
    assert _bench(*options) == 1
    (error,) = capfd.readouterr().err.splitlines()
    assert "bad.jsonl: line 1 is not JSON" in error


@pytest.mark.slow
def test_tokens_a_second_are_printed(capsys):
    assert _bench("--num-workers", "1", "--resume-after", "2000") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = ["throughput", "throughput_per_worker", "first_batch", "first_batch_resumed"]
    names.append("memory_per_worker")
    assert [line[:2] for line in lines] == [["loader", name] for name in names]
    assert all(float(line[2].replace(",", "")) > 0 for line in lines)


def test_rates_are_plain_digits():
    from sparsellm.bench.output import line
    from sparsellm.bench.record import Measurement

    fields = {"bench": "loader", "metric": "throughput", "unit": "tokens/s", "case": {}}
    assert "throughput 12,345,678 tokens/s" in line(Measurement(**fields, value=12345678.4))
    assert "throughput 0.25 tokens/s" in line(Measurement(**fields, value=0.25))
