"""Local JSONL and wandb: the same numbers, once, across restarts."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import replace

import pytest

from sparsellm.report.plots import plot_run
from sparsellm.runs.metrics import METRICS
from sparsellm.runs.metrics_log import MetricsLog
from sparsellm.runs.records import (
    KernelStats,
    StepStats,
    TrainRecord,
    ValidationRecord,
    nnz_bucket_edges,
    position_bucket_starts,
    read_metrics,
)
from sparsellm.training.progress import progress_line


def _record(recipe, step: int) -> TrainRecord:
    layers = recipe.model.num_hidden_layers
    buckets = len(position_bucket_starts(recipe.model.context_length))
    edges = nnz_bucket_edges(recipe.model.intermediate_size)
    return TrainRecord(
        step=step,
        tokens=step * recipe.train.global_batch_tokens,
        values={
            "loss": 5.0 / step,
            "l1": 0.5 / step,
            "l1_coefficient": 0.02,
            "target_error": None,
            "learning_rate": 1e-3,
            "grad_norm": 1.5,
            "tokens_per_second": 12_345.0,
            "mfu": None,
            "mfu_executed": None,
            "memory_gib": 1.25,
            "seconds": float(step),
        },
        l1_by_layer=[0.02] * layers,
        sparsity=StepStats(
            nnz_mean=[10.0 / step + layer for layer in range(layers)],
            nnz_max=[20] * layers,
            nnz_p50=[8] * layers,
            nnz_p99=[19] * layers,
            dead_fraction=[0.25 * layer for layer in range(layers)],
            nnz_by_position=[[float(b) for b in range(buckets)]] * layers,
            nnz_histogram=list(range(len(edges))),
        ),
        kernels=KernelStats([False] * layers, [12.5] * layers, overflows=0),
    )


def _write(recipe, steps, resume_step=0):
    log = MetricsLog(recipe, resume_step)
    for step in steps:
        log.write(_record(recipe, step))
        if step % 2 == 0:
            tokens = step * recipe.train.global_batch_tokens
            log.write(ValidationRecord(step, tokens, 4.0 / step, num_targets=512))
    log.close()


def test_jsonl_holds_what_was_written(tiny):
    recipe = tiny()
    _write(recipe, [1, 2])
    train, second, validation = read_metrics(recipe.run_path)
    assert (train["kind"], train["step"], train["loss"]) == ("train", 1, 5.0)
    assert second["sparsity"]["dead_fraction"] == [0.0, 0.25]
    assert validation == {
        "kind": "validation",
        "step": 2,
        "tokens": 512,
        "loss": 2.0,
        "num_targets": 512,
    }


def test_resume_drops_later_records_and_half_a_line(tiny):
    recipe = tiny()
    _write(recipe, [1, 2, 3])
    path = recipe.run_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    _write(recipe, [3, 4], resume_step=2)
    assert [(r["kind"], r["step"]) for r in read_metrics(recipe.run_path)] == [
        ("train", 1),
        ("train", 2),
        ("validation", 2),
        ("train", 3),
        ("train", 4),
        ("validation", 4),
    ]


def test_a_damaged_line_is_named_on_resume(tiny):
    recipe = tiny()
    _write(recipe, [1])
    path = recipe.run_path / "metrics.jsonl"
    path.write_text("\0\n" + path.read_text(), encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics.jsonl has a damaged line .*delete that line"):
        MetricsLog(recipe, 1)


def test_a_dashboard_that_fails_does_not_end_the_run(tiny, monkeypatch, capsys):
    class Dead:
        def log(self, values):
            raise ConnectionResetError("Connection lost")

    monkeypatch.setattr("sparsellm.runs.metrics_log.start_wandb", lambda recipe: Dead())
    recipe = tiny("logging.wandb=offline")
    _write(recipe, [1, 3, 5])
    assert [r["step"] for r in read_metrics(recipe.run_path)] == [1, 3, 5]
    printed = capsys.readouterr().err
    assert printed.count("warning: wandb stopped (ConnectionResetError: Connection lost)") == 1


def test_a_folder_without_metrics_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no run: it has no metrics.jsonl"):
        read_metrics(tmp_path)


def _offline_records(run_path):
    """The records in the files of the offline runs, oldest first.

    A .wandb file is LevelDB's log format behind a header of 7 bytes: chunks of crc (4), length
    (2), type (1: whole, 2 to 4: first, middle, last of several) in blocks of 32 KiB.
    """
    from wandb.proto import wandb_internal_pb2

    for path in sorted(run_path.glob("wandb/offline-run-*/run-*.wandb")):
        content = path.read_bytes()
        assert content[:4] == b":W&B"
        at, parts = 7, b""
        while at < len(content):
            left_in_block = 32_768 - at % 32_768
            if left_in_block < 7:
                at += left_in_block
                continue
            length, kind = struct.unpack_from("<HB", content, at + 4)
            parts += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(parts)
                parts = b""
                yield record


def _settled_records(run_path):
    """The same once they grow no more: wandb's own process may write on after its `finish`."""
    found, more = None, list(_offline_records(run_path))
    while found != more:
        time.sleep(0.5)
        found, more = more, list(_offline_records(run_path))
    return found


@pytest.mark.slow
def test_offline_wandb_run_holds_the_same_numbers_and_goes_on_after_resume(tiny, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe = tiny("logging.wandb=offline")
    _write(recipe, [1, 2, 3])
    _write(recipe, [3, 4], resume_step=2)

    records = _settled_records(recipe.run_path)
    history, run_ids, configs, metrics = [], set(), [], {}
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            history.append({key: json.loads(value) for key, value in items.items()})
        elif kind == "run":
            run_ids.add(record.run.run_id)
            configs.append({u.key: json.loads(u.value_json) for u in record.run.config.update})
        elif kind == "metric":
            metric = record.metric
            metrics[metric.name or metric.glob_name] = metric.step_metric

    assert run_ids == {(recipe.run_path / "wandb_id").read_text()}
    assert metrics["*"] == "tokens"
    assert configs[0]["model"]["intermediate_size"] == 64

    train = [h for h in history if "train/loss" in h]
    assert [h["step"] for h in train] == [1, 2, 3, 3, 4]
    written = {r["step"]: r for r in read_metrics(recipe.run_path) if r["kind"] == "train"}
    for h in train:
        local = written[h["step"]]
        assert h["tokens"] == local["tokens"]
        for key in ("loss", "l1", "grad_norm", "learning_rate", "tokens_per_second"):
            assert h[f"train/{key}"] == local[key]
        for layer in range(2):
            for key in ("nnz_mean", "nnz_p99", "nnz_max", "dead_fraction"):
                assert h[f"layers/{key}/{layer:02d}"] == local["sparsity"][key][layer]
        assert h["sparsity/nnz_by_layer/values"] == local["sparsity"]["nnz_mean"]
        assert h["sparsity/dead_fraction_by_layer/values"] == local["sparsity"]["dead_fraction"]
        assert h["sparsity/nnz_per_token/values"] == local["sparsity"]["nnz_histogram"]
        assert h["positions/nnz/00001"] == 1.0
    assert [h["validation/loss"] for h in history if "validation/loss" in h] == [2.0, 1.0]


def test_progress_line_is_one_readable_line(tiny):
    recipe = tiny("train.steps=1000")
    record = _record(recipe, 10)
    line = progress_line(replace(record, values=record.values | {"mfu": 0.412}), recipe)
    assert line == (
        "step   10/1000 | loss 0.5000 | l1 0.05 | nnz 1.5 (2.34%) | dead 12.5% | "
        "12.3k tok/s | mfu 41.2% | mem 1.2 GiB | eta 0:00:21"
    )
    assert "mfu" not in progress_line(record, recipe)


def test_every_value_of_a_step_has_an_entry_in_the_table_of_metrics(tiny):
    recipe = tiny()
    own = {metric.name for metric in METRICS if metric.of is None}
    assert set(_record(recipe, 1).values) == own
    assert len({metric.wandb_key for metric in METRICS}) == len(METRICS)


def test_plots_are_written(tiny):
    recipe = tiny()
    _write(recipe, [1])
    (recipe.run_path / "recipe.yaml").write_text(recipe.to_yaml())
    paths = plot_run(recipe.run_path)  # one record must do
    _write(recipe, [2, 3, 4], resume_step=1)
    assert paths == plot_run(recipe.run_path)
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 20_000
