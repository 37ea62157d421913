"""Where a run comes from: it goes on from its newest checkpoint; going back begins a new run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import set_arguments

from runs.test_checkpoint import _snapshot
from sparsellm.export.save_export import export
from sparsellm.recipe import load_recipe
from sparsellm.report.collect import read_runs
from sparsellm.report.tables import summary_table
from sparsellm.runs import checkpoint, saver
from sparsellm.runs.history import set_records_aside, start_of
from sparsellm.runs.telemetry.records import read_metrics


@pytest.fixture
def run_path(tmp_path):
    """A run of 40 steps that saved at 30, 35 and 40."""
    for step in (30, 35, 40):
        saver.save(tmp_path / "run" / "checkpoints", _snapshot(step), keep=3)
    return tmp_path / "run"


def test_a_run_goes_on_from_its_newest_checkpoint(run_path, tmp_path):
    newest = run_path / "checkpoints" / "step_00000040"
    assert start_of(run_path, None) == newest
    for same in (run_path, run_path / "checkpoints", newest):
        assert start_of(run_path, same) == newest
    shutil.copytree(newest, tmp_path / "copy")
    assert start_of(run_path, tmp_path / "copy") == newest
    assert start_of(tmp_path / "new", None) is None


def test_a_run_does_not_go_back_in_place(run_path):
    older = run_path / "checkpoints" / "step_00000030"
    with pytest.raises(ValueError, match=r"trained to step_00000040 and does not go back to .*30:"):
        start_of(run_path, older)
    shutil.copytree(older, run_path.parent / "copy")
    with pytest.raises(ValueError, match=r"does not go back to .*copy: .*add --set name=NEW"):
        start_of(run_path, run_path.parent / "copy")


def test_a_new_run_begins_from_the_checkpoint_of_another(run_path, tmp_path):
    new = tmp_path / "new"
    assert start_of(new, run_path) == run_path / "checkpoints" / "step_00000040"
    older = run_path / "checkpoints" / "step_00000030"
    assert start_of(new, older) == older
    saver.save(new / "checkpoints", _snapshot(32), keep=1)  # its trainer.json names no parent
    with pytest.raises(ValueError, match=r"new has trained to step_00000032 and does not go back"):
        start_of(new, older)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint or a run that has one"):
        start_of(tmp_path / "new", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"only weights; .* --set name=NEW --init-from"):
        start_of(tmp_path / "new", tmp_path)


def test_records_without_a_checkpoint_are_set_aside(tmp_path, monkeypatch):
    records, session = tmp_path / "metrics.jsonl", '{"kind": "session", "step": 0}\n'
    records.write_text(session)
    assert set_records_aside(tmp_path) is None  # there is nothing to lose
    for name in ("metrics.1.jsonl", "metrics.2.jsonl"):
        whole = session + json.dumps({"kind": "train", "step": 1, "loss": len(name)}) + "\n"
        records.write_text(whole)
        (tmp_path / "wandb_id").write_text("1234")
        (tmp_path / "wandb_sent.json").write_text('{"train": 1}')
        with monkeypatch.context() as patch:

            def killed(*arguments):
                raise KeyboardInterrupt

            patch.setattr(Path, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                set_records_aside(tmp_path)
        assert records.read_text() == whole
        assert set_records_aside(tmp_path) == tmp_path / name
        assert (tmp_path / name).read_text() == whole
        assert not records.exists()
        assert not list(tmp_path.glob("wandb*"))
    assert set_records_aside(tmp_path) is None


@pytest.fixture
def train(tiny_overrides, cli_here):
    def call(*arguments, **overrides):
        sets = [*tiny_overrides, "optimizer.schedule=constant", "validation.every_steps=0"]
        sets += [f"{k.replace('__', '.')}={v}" for k, v in overrides.items()]
        return cli_here("train", "--recipe", "debug", *set_arguments(sets), *arguments)

    return call


def _content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _steps(run_path):
    return [record["step"] for record in read_metrics(run_path, "train")]


def test_going_back_is_a_new_run_that_says_where_it_comes_from(train, tiny_overrides, tmp_path):
    run_path = load_recipe("debug", tiny_overrides).run_path
    old = run_path / "checkpoints" / "step_00000004"
    assert train(train__steps=8).returncode == 0
    before = _content(run_path)
    refused = train("--resume", str(old), train__steps=8)
    assert refused.returncode == 1
    assert (
        f"does not go back to {old}: to start a new run from it, add --set name=NEW"
        in refused.stderr
    )
    assert "loading PyTorch" not in refused.stdout
    began = train("--resume", str(old), name="new", train__steps=6)
    assert began.returncode == 0, began.stderr
    assert f"new/: new, goes on from {old}" in began.stdout
    again = train("--resume", str(old), name="new", train__steps=8)  # as after a kill
    assert again.returncode == 0, again.stderr
    assert "new/: resumes from step_00000006" in again.stdout
    assert _content(run_path) == before

    new = run_path.with_name("new")
    assert _steps(new) == [5, 6, 7, 8]
    last = new / "checkpoints" / "step_00000008"
    expected = checkpoint.read_kind(run_path / "checkpoints" / "step_00000008", "model")
    for name, tensor in checkpoint.read_kind(last, "model").items():
        assert tensor.equal(expected[name])
    parent = {
        "name": "debug",
        "step": 4,
        "tokens": 1024,
        "path": str(old.resolve()),
        "id": checkpoint.load(old).manifest.id,
    }
    assert checkpoint.read_trainer(last)["parent"] == parent
    assert [session["parent"] for session in read_metrics(new, "session")] == [parent, parent]
    assert "<td>step 4 of debug</td>" in summary_table(read_runs([new]))
    export(last, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| goes on from | step 4 (1,024 tokens) of `debug`, counted above |" in card


def test_a_new_run_that_was_killed_before_it_saved_begins_again(train, tiny_overrides):
    run_path = load_recipe("debug", tiny_overrides).run_path
    assert train(train__steps=4).returncode == 0
    back = ("--resume", str(run_path))
    assert train(*back, name="new", train__steps=6, checkpoint__every_steps=0).returncode == 0
    result = train(*back, name="new", train__steps=6)
    assert result.returncode == 0, result.stderr
    new = run_path.with_name("new")
    assert "has records and no checkpoint: training begins at step 4" in result.stdout
    assert _steps(new) == [5, 6]
    assert '"kind": "train", "step": 6' in (new / "metrics.1.jsonl").read_text()


def test_a_run_whose_newest_checkpoint_was_moved_away_goes_on_from_the_one_before(
    train, tiny_overrides, tmp_path
):
    run_path = load_recipe("debug", tiny_overrides).run_path
    assert train(train__steps=8).returncode == 0
    losses = [record["loss"] for record in read_metrics(run_path, "train")]
    (run_path / "checkpoints" / "step_00000008").rename(tmp_path / "damaged")
    result = train(train__steps=8)
    assert "debug/: resumes from step_00000006" in result.stdout, result.stderr
    assert [record["loss"] for record in read_metrics(run_path, "train")] == losses


@pytest.mark.parametrize("name", ["recipe.yaml", "trainer.json", "manifest.json"])
def test_damage_is_told_before_torch_is_loaded_with_the_checkpoint_before(
    train, tiny_overrides, name
):
    run_path = load_recipe("debug", tiny_overrides).run_path
    for step in (2, 4):
        saver.save(run_path / "checkpoints", _snapshot(step), keep=2)
    path = run_path / "checkpoints" / "step_00000004" / name
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))
    refused = train()
    assert refused.returncode == 1
    assert "loading PyTorch" not in refused.stdout
    older = path.parent.with_name("step_00000002")
    assert (
        f"{older} is the newest complete checkpoint before it. Move step_00000004" in refused.stderr
    )


def test_a_finished_run_with_wsd_goes_on_at_the_same_learning_rate(train, tiny_overrides):
    wsd = {"optimizer__schedule": "wsd", "optimizer__decay_steps": 2}
    few = {"checkpoint__every_steps": 5, "checkpoint__keep": 1}
    run_path = load_recipe("debug", tiny_overrides).run_path
    assert train(train__steps=8, **wsd, **few).returncode == 0
    folder = run_path / "checkpoints"
    assert [path.name for path in checkpoint.checkpoints_in(folder)] == [
        "step_00000006",  # before the decay
        "step_00000008",
    ]
    back = ("--resume", str(folder / "step_00000006"))
    result = train(*back, name="new", train__steps=12, **wsd, **few)
    assert result.returncode == 0, result.stderr
    assert "the learning rate changes" not in result.stdout
    new = read_metrics(run_path.with_name("new"), "train")
    peak = load_recipe("debug", tiny_overrides).optimizer.learning_rate
    rates = {record["step"]: record["learning_rate"] for record in new}
    assert rates == {**dict.fromkeys(range(7, 12), peak), 12: pytest.approx(peak * 0.5)}
    in_place = train(train__steps=12, **wsd, **few)
    assert "--resume …/step_00000006 --set name=NEW" in in_place.stdout
