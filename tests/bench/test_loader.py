"""The loader's benchmark: a figure for a figure, one line for a mistake."""

from __future__ import annotations

import json

import pytest
from conftest import set_arguments

from sparsellm.cli import main

SHORT = ["model.context_length=16", "train.micro_batch_size=2"]
BYTES = ["data.corpus=sample", "data.tokenizer=bytes"]  # nothing is downloaded


def _bench(*arguments, overrides=()):
    own = ["--num-workers", "0", "--seconds", "0.1"]
    return main(["bench", "loader", *own, *set_arguments([*SHORT, *BYTES, *overrides]), *arguments])


@pytest.mark.parametrize(
    ("overrides", "arguments", "message"),
    [
        (["data.corpus=nope"], [], "corpus 'nope': no such file"),
        (["data.corpus=local", "data.files=[/nope]"], [], "data.files: /nope does not exist"),
        (["data.corpus=local", "data.files=['/no*']"], [], "['/no*'] match no file"),
        ([], ["--num-workers", "-1"], "data.num_workers': must be greater than or equal to 0"),
    ],
)
def test_mistakes_are_one_line(capfd, overrides, arguments, message):
    assert _bench(*arguments, overrides=overrides) == 1
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.slow
def test_what_a_worker_met_is_one_line_too(capfd, tmp_path):
    (tmp_path / "good.jsonl").write_text('{"text": "fine"}\n' * 100)
    (tmp_path / "bad.jsonl").write_text("{oops\n")
    files = [str(tmp_path / name) for name in ("good.jsonl", "bad.jsonl")]
    overrides = ["data.corpus=local", f"data.files={json.dumps(files)}"]
    assert _bench("--num-workers", "1", overrides=overrides) == 1
    (error,) = capfd.readouterr().err.splitlines()
    assert "bad.jsonl: line 1 is not JSON" in error


def test_imports_that_take_long_are_said(capfd, monkeypatch):
    monkeypatch.setattr("sparsellm.waiting.QUIET_SECONDS", -1.0)
    assert _bench(overrides=["data.corpus=nope"]) == 1
    assert "loading PyTorch: 0 s" in capfd.readouterr().err


@pytest.mark.slow
def test_tokens_a_second_are_printed(capsys):
    assert _bench("--num-workers", "0", "1") == 0
    alone, with_worker = capsys.readouterr().out.splitlines()
    assert alone.startswith("loader corpus=sample tokenizer=bytes context_length=16 ")
    names = ["throughput", "throughput_per_worker", "first_batch", "first_batch_resumed"]
    for line, metrics in ((alone, names), (with_worker, [*names, "memory_per_worker"])):
        figures = [figure.split() for figure in line.partition(": ")[2].split(", ")]
        assert [name for name, *_ in figures] == metrics
        assert all(float(value.replace(",", "")) > 0 for _, value, *_ in figures)
