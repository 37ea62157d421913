"""Runs of an earlier version, whose recipes have keys that were removed since."""

from __future__ import annotations

import pytest
import yaml

from sparsellm.export.save_export import export
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import REMOVED_KEYS, Recipe
from sparsellm.report.page import write_report
from sparsellm.runs.huggingface.find import find_checkpoint
from sparsellm.runs.huggingface.pretrained import load_pretrained, read_weights
from sparsellm.training import loop


def _train(recipe, **options):
    with StopRequest() as stop:
        loop.train(recipe, stop, **options)


def _as_earlier(monkeypatch, recipe, values):
    """Trains and exports with recipes saved as they were when they had these keys."""
    to_yaml = Recipe.to_yaml

    def earlier(recipe):
        content = yaml.safe_load(to_yaml(recipe))
        for key, value in values.items():
            section, leaf = key.split(".")
            content[section][leaf] = value
        return yaml.safe_dump(content)

    with monkeypatch.context() as patch:
        patch.setattr(Recipe, "to_yaml", earlier)
        _train(recipe)
        checkpoint = find_checkpoint(recipe.run_path)
        exported = recipe.run_path.parent / "exported"
        export(checkpoint, exported)
    for saved in (recipe.run_path / "recipe.yaml", checkpoint / "recipe.yaml"):
        content = yaml.safe_load(saved.read_text())
        assert all(content[key.split(".")[0]][key.split(".")[1]] == values[key] for key in values)
    return checkpoint, exported


def test_they_are_used_as_before(tiny, tmp_path, monkeypatch, capsys):
    checkpoint, exported = _as_earlier(monkeypatch, tiny("train.steps=2"), REMOVED_KEYS)
    expected = tiny("train.steps=2")
    assert load_pretrained(checkpoint).recipe == load_pretrained(exported).recipe == expected
    assert read_weights(checkpoint).recipe == expected
    export(checkpoint, tmp_path / "again")
    assert write_report([expected.run_path])
    capsys.readouterr()
    _train(tiny("train.steps=2", "name=started"), init_from=exported)
    _train(tiny("train.steps=4", "optimizer.learning_rate=0.1"))
    out = capsys.readouterr().out
    assert "resuming from" in out
    # The keys are no change, and the learning rate is compared with that of the saved recipe.
    changed = [line for line in out.splitlines() if "changed since the checkpoint" in line]
    assert len(changed) == 2
    assert all("learning_rate" in line or "train.steps" in line for line in changed)
    assert "the learning rate changes from" in out


def test_one_that_such_a_key_changed_says_why_it_is_refused(tiny, monkeypatch):
    recipe = tiny("train.steps=2")
    values = dict.fromkeys(REMOVED_KEYS, 0.5)
    with pytest.raises(ValueError, match="was removed, and its value is always"):
        _as_earlier(monkeypatch, recipe, values)  # its export
    with pytest.raises(ValueError, match=r"recipe\.yaml, line \d+: key .* was removed") as error:
        load_pretrained(find_checkpoint(recipe.run_path))
    assert all(key in str(error.value) for key in REMOVED_KEYS)
