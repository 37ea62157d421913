"""Benchmarks during training: what they lack is said first; a failure does not end the run."""

import importlib.util
import signal

import pytest
from conftest import set_arguments

from sparsellm.evaluate.lm import SparseLM
from sparsellm.recipe import load_recipe
from sparsellm.training import loop

EVALUATED = "evaluation.every_steps=2"
SIZES = ["0.5b", "1b", "1.5b", "2b", "8b", "small"]


@pytest.fixture
def nothing_is_built(monkeypatch):
    def fail(*arguments):
        raise AssertionError("the model was built first")

    monkeypatch.setattr(loop, "build_run", fail)


@pytest.mark.usefixtures("nothing_is_built")
def test_without_lm_eval_training_says_what_to_install_or_to_leave_out(
    tiny_overrides, tmp_path, monkeypatch, cli_here
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name)
    )
    stderr = cli_here(
        "train", "debug", *set_arguments([*tiny_overrides, EVALUATED]), status=1
    ).stderr
    assert "pip install 'lm-eval>=" in stderr or "pip install -e '.[eval]'" in stderr
    assert (
        "(evaluation.every_steps 2); --set evaluation.every_steps=0 trains without them" in stderr
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("nothing_is_built")
def test_a_missing_file_of_rows_is_named_before_training(tiny_overrides, tmp_path, cli_here):
    overrides = [EVALUATED, f"evaluation.data_dir={tmp_path}"]
    stderr = cli_here(
        "train", "debug", *set_arguments([*tiny_overrides, *overrides]), status=1
    ).stderr
    assert f"{tmp_path}/" in stderr
    assert ".jsonl is missing" in stderr
    assert "--set evaluation.every_steps=0" in stderr


def test_a_sweep_says_so_before_its_first_run(tiny_overrides, tmp_path, error_of):
    sweep = tmp_path / "scored.yaml"
    sweep.write_text("{name: scored, recipe: debug, runs: [{name: a}]}")
    overrides = [EVALUATED, f"evaluation.data_dir={tmp_path}"]
    error = error_of("sweep", sweep, *set_arguments([*tiny_overrides, *overrides]))
    assert ".jsonl is missing" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_scored_and_have_a_target(name):
    recipe = load_recipe(name)
    assert 0 < recipe.evaluation.every_steps <= recipe.train.steps
    assert recipe.sparsity.target_nnz == (76 if name == "8b" else 30)


@pytest.mark.usefixtures("suite_of_two")
def test_a_failed_or_interrupted_evaluation_does_not_end_the_run(train, test_data, monkeypatch):
    overrides = ["validation.every_steps=0", "evaluation.every_steps=2", "evaluation.limit=3"]
    overrides += ["evaluation.batch_size=4", f"evaluation.data_dir={test_data / 'eval'}"]
    real, calls = SparseLM._model_call, []

    def faulty(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("CUDA out of memory")
        if len(calls) == 4:  # of the second evaluation, that of step 4
            signal.raise_signal(signal.SIGTERM)
        return real(self, *args, **kwargs)

    def kinds(done):
        run_records = [r for r in done.records() if not r["kind"].startswith("session")]
        return [(r["kind"], r["step"]) for r in run_records[1:]]

    monkeypatch.setattr(SparseLM, "_model_call", faulty)
    stopped = train(*overrides)
    assert "the evaluation failed (RuntimeError: CUDA out of memory)" in stopped.stderr
    assert "stopped after step 4 (SIGTERM)" in stopped.stdout
    trained = [("train", 2), ("failure", 2), ("train", 3), ("train", 4)]
    assert kinds(stopped) == trained
    assert kinds(train(*overrides)) == [*trained, ("evaluation", 4)]
