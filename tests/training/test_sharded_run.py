"""A run that two ranks save in shards: every command reads it, and other launches continue it."""

import json

import pytest
import torch
from conftest import set_arguments
from safetensors.torch import load_file
from warm import ranks

from sparsellm.recipe import load_recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.records import read_metrics


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_are_read_by_every_command_and_continued_by_other_launches(
    tiny_overrides, cli_here, test_data, tmp_path
):
    # A constant learning rate: the parts do not know how long the run will be.
    overrides = [*tiny_overrides, "train.micro_batch_size=1", "optimizer.min_lr_ratio=1"]
    run_path = load_recipe("debug", [*overrides, "name=parts"]).run_path

    def arguments(steps, name="parts"):
        run_arguments = set_arguments([*overrides, f"train.steps={steps}", f"name={name}"])
        return ["train", "--recipe", "debug", *run_arguments]

    def train_on_two(steps, config):
        ranks(2, "-m", "sparsellm", *arguments(steps), config=config)

    def read(*words):
        done = cli_here(*words)
        return done.stdout

    train_on_two(2, "fsdp2.yaml")
    path = checkpoint.latest(run_path / "checkpoints")
    assert len(list(path.glob("model-0000?-of-00002.safetensors"))) == 2
    weights = checkpoint.read_kind(path, "model")

    out = tmp_path / "exported"
    read("export", str(run_path), str(out))
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[n], w.to(exported[n].dtype)) for n, w in weights.items())
    read("report", str(run_path), "--out", str(tmp_path / "report.html"))
    assert "parts" in (tmp_path / "report.html").read_text()
    read("analyze", str(run_path), "--tokens", "256", "--out", str(tmp_path / "analysis"))
    statistics = json.loads((tmp_path / "analysis" / "statistics.json").read_text())
    assert statistics
    data = ["--data-dir", str(test_data / "eval"), "--tasks", "piqa", "--limit", "4"]
    scores = tmp_path / "scores.json"
    read("eval", str(run_path), *data, "--out", str(scores))
    assert "piqa" in scores.read_text()

    train_on_two(4, "ddp8.yaml")
    train_on_two(6, "fsdp2.yaml")
    assert "resuming from" in read(*arguments(8))
    read(*arguments(8, "straight"))
    parts, straight = (
        [(r["step"], r["loss"]) for r in read_metrics(path, "train")]
        for path in (run_path, run_path.with_name("straight"))
    )
    assert [step for step, _ in parts] == list(range(1, 9))
    for (_, loss), (_, usual) in zip(parts, straight, strict=True):
        assert loss == pytest.approx(usual, rel=1e-5)
