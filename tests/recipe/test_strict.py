"""Damaged and hostile files are one sentence that names file, line and key."""

import json

import pytest

from sparsellm.recipe import load_recipe
from sparsellm.runs.huggingface import hf_folder
from sparsellm.runs.telemetry.evaluations import read_evaluations
from sparsellm.runs.telemetry.records import METRICS_FILE, read_metrics


@pytest.mark.parametrize("value", [".inf", ".nan", "-.inf"])
def test_numbers_of_a_recipe_are_finite(value):
    with pytest.raises(ValueError, match=r"key 'optimizer.learning_rate'"):
        load_recipe("debug", [f"optimizer.learning_rate={value}"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{\n "step": 1,\n "tokens": \n}\n', "is damaged: not JSON .*, line 4"),
        ('{"tokens": 1}', "key 'step' is missing"),
        ('{"step": -1, "tokens": 0}', "key 'step'"),
        ('{"tokens": 1,\n"step": "x"}', "trainer.json, line 2: key 'step': must be a valid int"),
        ("\xff\xfe{}", "trainer.json is truncated or damaged .*utf-8"),
    ],
)
def test_json_that_is_not_a_state(tmp_path, text, reason):
    path = tmp_path / "sparsellm_trainer.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=reason) as caught:
        hf_folder.read_trainer(tmp_path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(hf_folder.REMEDY)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "line 2: expected an object"),
        ('{"kind": "train"}', "line 2: key 'step' is missing"),
        ('{"kind": "validation", "step": 1, "tokens": 2, "loss": "low"}', "line 2: key 'loss'"),
        ('{"kind": "train", "step": 1, "sparsity": {"nnz_mean": 1}}', "key 'sparsity.nnz_mean'"),
        ('{"kind": "train", "step": 1, "tokens": 1, "loss": "low"}', "line 2: key 'loss'"),
        ('{"kind": ["x"], "step": 1, "tokens": 1}', "line 2"),
        ('{"step": 1', "line 2 is damaged: not JSON"),
    ],
)
def test_a_line_of_metrics_that_is_not_a_record_is_named(tmp_path, line, reason):
    good = '{"kind": "validation", "step": 1, "tokens": 2, "loss": 3.0, "num_targets": 4}\n'
    (tmp_path / METRICS_FILE).write_text(f"{good}{line}\n{good}", encoding="utf-8")
    with pytest.raises(ValueError, match=reason) as caught:
        read_metrics(tmp_path)
    assert "metrics.jsonl" in str(caught.value)
    assert "restore the file from a copy, or correct that line" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {"step": 1, "tasks": []},
        {"step": 1, "tasks": {"piqa": 0.5}},
        {"step": 1, "mean": float("nan"), "tasks": {}},
        {"step": 1, "tasks": {"piqa": {"acc": float("nan")}}},
        {"step": 1, "tasks": {"piqa": {"acc": 0.5}}, "suite": []},
    ],
)
def test_scores_that_are_none_are_named(tmp_path, content):
    (tmp_path / "eval_step_00000001.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"eval_step_00000001.json, line 1: key [^$]*evaluate again"
    ):
        read_evaluations(tmp_path, [])
