"""What follows a step: saved first; a failure is logged, an interruption made up for on resume."""

import re
import shutil
import signal

import pytest

from sparsellm.data.loader import TokenLoader
from sparsellm.runs import checkpoint
from sparsellm.training.validation import ValidationSet


def _kinds(done):
    records = [r for r in done.records() if not r["kind"].startswith("session")]
    return [(r["kind"], r["step"]) for r in records if r["kind"] != "train"]


def _at_call(monkeypatch, owner, name, number, action):
    """Has the ``number``-th call of a method begin with ``action``."""
    real, calls = getattr(owner, name), []

    def method(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            action()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


def _raise(error):
    raise error


def test_a_text_too_short_to_hold_out_trains_without_validation(train, tmp_path):
    (tmp_path / "a.txt").write_text("a few words " * 100)
    done = train(f"data.files=[{tmp_path}/a.txt]", "validation.every_steps=2")
    assert [(r["what"], r["step"], r["error"]) for r in done.records("failure")] == [
        ("validation", 2, "no held-out text"),
        ("validation", 4, "no held-out text"),
    ]


def test_after_a_validation_the_model_trains_again_with_its_dropout(build):
    run = build("validation.every_steps=2", "runtime.compile=false")
    [held_out] = run.validation.values()
    held_out.loss(run.objective, run.accelerator)
    assert all(module.training for module in run.objective.modules())


def test_a_failed_validation_is_logged_and_training_continues(train, monkeypatch):
    error = RuntimeError("CUDA out of memory")
    _at_call(monkeypatch, ValidationSet, "_batch", 2, lambda: _raise(error))
    done = train("validation.every_steps=2")
    warning = "warning: step 2: the validation failed (RuntimeError: CUDA out of memory)"
    assert warning in done.stderr
    assert _kinds(done) == [("failure", 2), ("validation", 4)]
    # A run that was killed there does not fail at it again and again.
    shutil.rmtree(done.checkpoint(4))
    assert _kinds(train("validation.every_steps=2")) == [("failure", 2), ("validation", 4)]


def test_a_failed_validation_that_is_to_stop_the_run_comes_after_the_save(train, monkeypatch):
    error = ValueError("no good")
    _at_call(monkeypatch, ValidationSet, "_batch", 1, lambda: _raise(error))
    stopped = train("validation.every_steps=2", "validation.on_error=stop", status=1)
    assert stopped.stderr == "error: no good\n"
    assert checkpoint.latest(stopped.path / "checkpoints").name == "step_00000002"
    again = train("validation.every_steps=2", "validation.on_error=stop")
    assert _kinds(again) == [("validation", 2), ("validation", 4)]
    # Of one corpus, whose name is not said.
    whole_line = r"^step 4 \| validation loss \d\.\d{4} \([\d,]+ tokens\)$"
    assert re.search(whole_line, again.stdout, re.MULTILINE)


@pytest.mark.parametrize("steps", [2, 4])  # the last one, and one before
def test_a_signal_within_validation_leaves_it_to_the_resumed_run(train, monkeypatch, steps):
    stopping = ["validation.every_steps=2", f"train.steps={steps}", "checkpoint.every_steps=3"]
    with monkeypatch.context() as patch:
        _at_call(patch, ValidationSet, "_batch", 2, lambda: signal.raise_signal(signal.SIGTERM))
        stopped = train(*stopping)
    assert "stopped after step 2 (SIGTERM); the same command resumes here" in stopped.stdout
    assert "SIGTERM: saves after this step" in stopped.stderr or not stopped.stderr
    assert _kinds(stopped) == []
    assert checkpoint.latest(stopped.path / "checkpoints").name == "step_00000002"
    assert _kinds(train(*stopping)) == [("validation", step) for step in range(2, steps + 1, 2)]


def test_a_rank_without_data_saves_what_the_steps_before_made(train, monkeypatch):
    straight = train("name=straight", "train.micro_batch_size=4")
    with monkeypatch.context() as patch:
        error = FileNotFoundError("shard 7 is missing; restore it")
        # Two micro-batches a step: the second of step 4, when the first has moved the position.
        _at_call(patch, TokenLoader, "__next__", 8, lambda: _raise(error))
        failed = train("checkpoint.every_steps=1000", "train.micro_batch_size=4", status=1)
    assert failed.stderr == "error: shard 7 is missing; restore it\n"
    assert failed.stdout.endswith("step_00000003\n"), failed.stdout
    resumed = train("train.micro_batch_size=4")
    losses = [[r["loss"] for r in done.records("train")] for done in (resumed, straight)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_without_checkpoints_nothing_is_saved_and_a_stop_says_so(train, monkeypatch):
    off = ["checkpoint.every_steps=0", "validation.every_steps=2", "train.micro_batch_size=4"]
    with monkeypatch.context() as patch:
        _at_call(patch, ValidationSet, "_batch", 2, lambda: signal.raise_signal(signal.SIGTERM))
        stopped = train(*off)
    assert "stopped after step 2 (SIGTERM); nothing was saved" in stopped.stdout
    with monkeypatch.context() as patch:
        _at_call(patch, TokenLoader, "__next__", 8, lambda: _raise(ValueError("no more")))
        failed = train(*off, status=1)
    assert "saved" not in failed.stdout
    assert checkpoint.latest(failed.path / "checkpoints") is None
