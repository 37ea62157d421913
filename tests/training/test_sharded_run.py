"""A run that two ranks save in shards: every command reads it, and other launches continue it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from sparsellm.runs import checkpoint


@pytest.mark.long
@pytest.mark.timeout(600)
def test_shards_are_read_by_every_command_and_continued_by_other_launches(
    train, train_on, cli_here, test_data, tmp_path
):
    # A constant learning rate: the parts do not know how long the run will be.
    overrides = ["train.micro_batch_size=1", "optimizer.min_lr_ratio=1"]
    parts = train_on(2, *overrides, "train.steps=2", config="fsdp2.yaml")
    path = parts.checkpoint(2)
    assert len(list(path.glob("model-0000?-of-00002.safetensors"))) == 2
    weights = checkpoint.read_kind(path, "model")

    out = tmp_path / "exported"
    cli_here("export", parts.path, out)
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[n], w.to(exported[n].dtype)) for n, w in weights.items())
    cli_here("report", parts.path, "--out", tmp_path / "report.html")
    assert "debug" in (tmp_path / "report.html").read_text()
    cli_here("analyze", parts.path, "--tokens", "256", "--out", tmp_path / "analysis")
    statistics = json.loads((tmp_path / "analysis" / "statistics.json").read_text())
    assert statistics
    data = ["--data-dir", str(test_data / "eval"), "--tasks", "piqa", "--limit", "4"]
    scores = tmp_path / "scores.json"
    cli_here("eval", parts.path, *data, "--out", scores)
    assert "piqa" in scores.read_text()

    train_on(2, *overrides, "train.steps=4", config="ddp8.yaml")
    train_on(2, *overrides, "train.steps=6", config="fsdp2.yaml")
    whole = train(*overrides, "train.steps=8")
    assert "resuming from" in whole.stdout
    straight = train(*overrides, "train.steps=8", "name=straight")
    assert [r["step"] for r in whole.records("train")] == list(range(1, 9))
    losses, usual = ([r["loss"] for r in run.records("train")] for run in (whole, straight))
    assert losses == pytest.approx(usual, rel=1e-5)
