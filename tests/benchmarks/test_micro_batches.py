"""Throughput is measured at every size, with every optimizer, and the weights stay as they are."""

import json

import torch
from conftest import set_arguments

import micro_batches


def test_each_size_and_optimizer_is_measured_on_the_same_weights(
    tiny_overrides, tmp_path, capsys, monkeypatch
):
    weights, measure = [], micro_batches._measure

    def measured(run, *arguments):
        weights.append(run.model.model.embed_tokens.weight.detach().clone())
        return measure(run, *arguments)

    monkeypatch.setattr(micro_batches, "_measure", measured)
    record = tmp_path / "results.jsonl"
    words = ["--recipe", "debug", "--sizes", "2", "1", "--settle", "2", "--steps", "2"]
    words += ["--profile", "--record", str(record), *set_arguments(tiny_overrides)]
    micro_batches.main(words)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    settings = [(line["case"]["optimizer"], line["case"]["micro_batch_size"]) for line in lines]
    assert settings == [("muon", 2), ("muon", 1), ("adamw", 2), ("adamw", 1)]
    assert all(line["value"] > 0 for line in lines)
    assert lines[0]["case"]["config"] == "single"
    assert lines[0]["command"].startswith("python benchmarks/micro_batches.py --recipe debug")
    for later in weights[1:]:
        torch.testing.assert_close(later, weights[0], rtol=0, atol=1e-4)
    assert "Self CPU" in capsys.readouterr().out
