"""Going back loses nothing: what the present branch does not continue is set aside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import set_arguments

from runs.test_checkpoint import _names, _snapshot
from sparsellm.recipe import load_recipe
from sparsellm.runs import checkpoint, history, saver
from sparsellm.runs.history import begin_branch, finish_change
from sparsellm.runs.records import read_metrics


@pytest.fixture
def run_path(tmp_path):
    """A run of 40 steps that saved at 30, 35 and 40."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (30, 35, 40):
        saver.save(folder, _snapshot(step), keep=3)
    _record(folder.parent, range(1, 41))
    (folder / "eval_step_00000040.json").write_text('{"step": 40}')
    return folder.parent


def _record(run_path, steps):
    lines = [json.dumps({"kind": "train", "step": step}) + "\n" for step in steps]
    (run_path / "metrics.jsonl").write_text("".join(lines))
    (run_path / "recipe.yaml").write_text("name: r\n")


def _steps(run_path):
    return [record["step"] for record in _records(run_path)]


def _resume(folder, resumed, steps, keep=3):
    manifest = checkpoint.load(resumed).manifest
    keeper = saver.Saver(folder, keep, manifest.branch)
    for step in steps:
        keeper.begin(_snapshot(step))
        keeper.wait()
    keeper.close()


def test_going_back_sets_the_later_checkpoints_and_their_records_aside(run_path):
    folder = run_path / "checkpoints"
    (run_path / "wandb_id").write_text("1234")
    (run_path / "wandb_sent.json").write_text('{"train": 40}')
    (folder / "eval_step_00000040_samples").mkdir()
    notes = begin_branch(run_path, folder / "step_00000030")
    assert not list(run_path.glob("wandb_*"))  # its steps from 31 on are others
    aside = run_path / "abandoned" / "1"
    assert "step_00000035, step_00000040 and the records" in notes[0]
    assert f"--resume {aside / 'step_00000040'} returns" in notes[0]
    names = ["eval_step_00000040.json", "eval_step_00000040_samples", "metrics.jsonl"]
    names += ["recipe.yaml"]
    assert _names(aside) == [*names, "step_00000035", "step_00000040"]
    assert _steps(aside) == list(range(1, 41))
    assert _names(folder) == ["latest", "step_00000030"]
    assert checkpoint.latest(folder) == folder / "step_00000030"  # also if it is killed now
    _resume(folder, folder / "step_00000030", (32, 34))
    assert _names(folder) == ["latest", "step_00000030", "step_00000032", "step_00000034"]
    (folder / "latest").unlink()
    assert checkpoint.latest(folder) == folder / "step_00000034"
    assert begin_branch(run_path, folder / "step_00000034") == []


def test_of_a_branch_that_was_set_aside_the_records_come_back(run_path):
    folder = run_path / "checkpoints"
    begin_branch(run_path, folder / "step_00000030")
    _resume(folder, folder / "step_00000030", (32,))
    _record(run_path, range(1, 33))
    (run_path / "metrics.jsonl").write_text(
        (run_path / "metrics.jsonl").read_text().replace('"step": 32', '"step": 32, "loss": 1.0')
    )
    back = run_path / "abandoned" / "1" / "step_00000035"
    notes = begin_branch(run_path, back)
    assert "step_00000032 and the records" in notes[0]
    assert "abandoned/1 are the run's again" in notes[1]
    assert back.is_dir()
    assert _names(folder) == ["latest", "step_00000030"]
    assert checkpoint.latest(folder) == folder / "step_00000030"
    assert _steps(run_path) == list(range(1, 41))  # the log then drops those after step 35
    assert _steps(run_path / "abandoned" / "2") == list(range(1, 33))
    _record(run_path, range(1, 38))  # killed before it saved: the same command once more
    assert len(begin_branch(run_path, back)) == 1
    assert not (run_path / "abandoned" / "3").exists()
    assert _steps(run_path) == list(range(1, 41))
    _resume(folder, back, (37,))
    assert begin_branch(run_path, folder / "step_00000037") == []
    _record(run_path, range(1, 38))
    assert (
        begin_branch(run_path, back) != []
    )  # of what continues it, only checkpoints are set aside
    assert _steps(run_path) == list(range(1, 38))
    assert _names(run_path / "abandoned" / "3") == ["metrics.jsonl", "recipe.yaml", "step_00000037"]


class Killed(BaseException):
    """In place of SIGKILL: nothing handles it."""


def _kill_at(monkeypatch, number):
    """Kills at the given change of the file system."""
    left = number

    def dying(real):
        def call(*arguments, **options):
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            return real(*arguments, **options)

        return call

    for name in ("rename", "replace", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))


def _content(run_path):
    """All files, with the text of those that a change of branch writes."""
    texts = {".jsonl", ".yaml", ""}
    return {
        path.relative_to(run_path).as_posix(): path.read_text() if path.suffix in texts else None
        for path in run_path.rglob("*")
        if path.is_file() and ".tmp-" not in path.name
    }


@pytest.mark.parametrize("back", [False, True], ids=["set aside", "resumed again"])
def test_a_kill_at_any_moment_leaves_weights_and_records_of_one_branch(
    run_path, tmp_path, monkeypatch, back
):
    folder, resumed = run_path / "checkpoints", "checkpoints/step_00000030"
    if back:
        begin_branch(run_path, run_path / resumed)
        _resume(folder, run_path / resumed, (32, 35))  # two of the same step, of either branch
        _record(run_path, range(1, 36))
        resumed = "abandoned/1/step_00000040"
    whole = tmp_path / "whole"
    shutil.copytree(run_path, whole)
    begin_branch(whole, whole / resumed)
    expected = _content(whole)
    for number in range(100):
        copy = tmp_path / str(number)
        shutil.copytree(run_path, copy)
        killed = False
        with monkeypatch.context() as patch:
            _kill_at(patch, number)
            try:
                begin_branch(copy, copy / resumed)
            except Killed:
                killed = True
        begun = (copy / "branch.json").exists()
        finish_change(copy)
        assert _content(copy) == (expected if begun or not killed else _content(run_path))
        if not killed:
            break
    assert number > 8
    assert checkpoint.latest(copy / "checkpoints").name == "step_00000030"


def test_another_runs_checkpoint_replaces_the_whole_history(run_path, tmp_path):
    other = saver.save(tmp_path / "other", _snapshot(7), keep=1)
    begin_branch(run_path, other)
    assert checkpoint.checkpoints_in(run_path / "checkpoints") == []
    assert (run_path / "metrics.jsonl").read_text() == ""
    assert _steps(run_path / "abandoned" / "1") == list(range(1, 41))


def test_another_runs_checkpoint_does_not_continue_the_records_of_a_dead_run(tmp_path):
    run_path, other = tmp_path / "run", saver.save(tmp_path / "other", _snapshot(7), keep=1)
    run_path.mkdir()
    _record(run_path, range(1, 6))  # killed before it saved anything
    [note] = begin_branch(run_path, other)
    aside = run_path / "abandoned" / "1"
    assert f"of steps that {other} does not continue are set aside in {aside}" in note
    assert (run_path / "metrics.jsonl").read_text() == ""
    assert _steps(aside) == [1, 2, 3, 4, 5]
    assert begin_branch(run_path, other) == []


def test_a_copy_outside_continues_the_records_of_its_run(run_path, tmp_path):
    folder = run_path / "checkpoints"
    shutil.copytree(folder / "step_00000030", tmp_path / "kept")
    shutil.rmtree(folder / "step_00000030")  # as when it was pruned
    [note] = begin_branch(run_path, tmp_path / "kept")
    assert "training goes on from kept: step_00000035, step_00000040 and the records" in note
    assert _steps(run_path) == list(range(1, 41))  # the log then drops those after step 30


def test_a_fork_elsewhere_continues_the_records_up_to_where_it_began(run_path, tmp_path):
    folder, fork = run_path / "checkpoints", tmp_path / "fork"
    shutil.copytree(folder, fork)
    _resume(fork, fork / "step_00000040", (42, 44))
    _record(run_path, range(1, 43))  # steps 41 and 42 are others here
    [note] = begin_branch(run_path, fork / "step_00000044")
    assert "of steps that" in note
    assert _steps(run_path) == list(range(1, 41))
    assert _steps(run_path / "abandoned" / "1") == list(range(1, 43))


def test_records_without_a_checkpoint_are_set_aside(run_path):
    for path in checkpoint.checkpoints_in(run_path / "checkpoints"):
        path.rename(run_path.parent / path.name)  # as when a scratch disk is purged
    with (run_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "session", "step": 0}\n')
    notes = begin_branch(run_path, None)
    assert "has records and no checkpoint: training begins at step 0" in notes[0]
    assert _steps(run_path / "abandoned" / "1") == [*range(1, 41), 0]
    assert [record["kind"] for record in _records(run_path)] == ["session"]
    assert begin_branch(run_path, None) == []


def test_training_goes_back_and_returns(tiny_overrides, cli_here):
    def train(*arguments, **overrides):
        sets = [*tiny_overrides, *(f"{k.replace('__', '.')}={v}" for k, v in overrides.items())]
        result = cli_here("train", "--recipe", "debug", *set_arguments(sets), *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    run_path = load_recipe("debug", tiny_overrides).run_path
    folder = run_path / "checkpoints"
    train(train__steps=8)
    good = checkpoint.read_kind(folder / "step_00000008", "model")
    assert _names(folder) == ["latest", "step_00000004", "step_00000006", "step_00000008"]
    went_back = ["--resume", str(folder / "step_00000004")]
    lower = {"optimizer__learning_rate": 1e-4, "checkpoint__every_steps": 1}
    out = train(*went_back, train__steps=6, **lower)
    assert "step_00000006, step_00000008 and the records" in out
    assert _names(folder) == ["latest", "step_00000004", "step_00000005", "step_00000006"]
    assert [r["step"] for r in _records(run_path) if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    returned = ["--resume", str(run_path / "abandoned" / "1")]
    out = train(*returned, train__steps=9)
    assert "abandoned/1 are the run's again" in out
    assert [r["step"] for r in _records(run_path) if r["kind"] == "train"] == list(range(1, 10))
    assert _names(folder) == ["latest", "step_00000004", "step_00000009"]
    kept = run_path / "abandoned" / "1" / "step_00000008"
    for name, tensor in checkpoint.read_kind(kept, "model").items():
        assert tensor.equal(good[name])


def test_returning_to_a_branch_goes_on_after_a_kill(tiny_overrides, cli_here, monkeypatch):
    def train(*arguments, steps):
        sets = set_arguments([*tiny_overrides, f"train.steps={steps}", "seed=1"])
        return cli_here("train", "--recipe", "debug", *sets, *arguments)

    run_path = load_recipe("debug", tiny_overrides).run_path
    assert train(steps=8).returncode == 0
    rates = [r["seconds"] for r in _records(run_path) if r["kind"] == "train"]
    folder = run_path / "checkpoints"
    assert train("--resume", str(folder / "step_00000004"), steps=6).returncode == 0
    back = ("--resume", str(run_path / "abandoned" / "1"))
    real = history.write_atomically

    def killed(path, text):
        if path == run_path / "metrics.jsonl":
            raise Killed
        real(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(history, "write_atomically", killed)
        with pytest.raises(Killed):
            train(*back, steps=8)
    finished = train(*back, steps=10)
    assert finished.returncode == 0, finished.stderr
    train_records = [r for r in _records(run_path) if r["kind"] == "train"]
    assert [r["step"] for r in train_records] == list(range(1, 11))
    assert [r["seconds"] for r in train_records[:8]] == rates


def _records(run_path):
    return read_metrics(run_path)
