"""The optimizers' steps are timed on the parameters that a training run has."""

import json
import shlex

from conftest import ROOT, set_arguments

import optimizer_step


def test_each_optimizer_is_timed_and_recorded(tiny_overrides, tmp_path):
    record = tmp_path / "results.jsonl"
    words = ["--recipe", "debug", "--steps", "2", "--record", str(record)]
    optimizer_step.main([*words, *set_arguments(tiny_overrides)])
    adamw, muon, normalized = map(json.loads, record.read_text().splitlines())
    assert [line["case"]["optimizer"] for line in (adamw, muon)] == ["adamw", "muon"]
    assert normalized["case"] == muon["case"] | {"normalize_neurons": True}
    assert normalized["baseline"] == adamw["value"]
    assert muon["case"]["config"] == "single"
    assert adamw["value"] > 0
    assert muon["ratio"] == muon["value"] / adamw["value"]
    script, *arguments = shlex.split(muon["command"])[1:]
    assert (ROOT / script).samefile(optimizer_step.__file__)
    assert arguments == ["--recipe", "debug", "--steps", "2", *set_arguments(tiny_overrides)]
