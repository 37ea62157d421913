"""Where a run comes from: it goes on from its newest checkpoint; going back begins a new run."""

import json
import shutil
from pathlib import Path

import pytest

from runs.test_checkpoint import _snapshot
from sparsellm.export.save_export import export
from sparsellm.report.collect import read_runs
from sparsellm.report.tables import summary_table
from sparsellm.runs import checkpoint, saver
from sparsellm.runs.history import set_records_aside, start_of


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
def tiny_overrides(tiny_overrides):
    return [*tiny_overrides, "optimizer.schedule=constant", "validation.every_steps=0"]


def _content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _steps(done):
    return [record["step"] for record in done.records("train")]


def test_scores_of_checkpoints_that_are_gone_are_not_those_of_the_next(train):
    first = train("train.steps=4")
    scores = {"step": 4, "tasks": {"piqa": {"acc": 0.5}}}
    (first.path / "checkpoints" / "eval_step_00000004_piqa.json").write_text(json.dumps(scores))
    (first.path / "checkpoints" / "analysis_step_00000004").mkdir()
    train("train.steps=5")
    assert len(read_runs([first.path])[0].evaluations) == 1  # they are still of a step of this run
    (first.path / "sample.json").write_text(json.dumps({"step": 5, "text": "def"}))
    for step in (4, 5):
        shutil.rmtree(first.checkpoint(step))
    again = train("train.steps=5", "seed=1", "data.on_mismatch=restart")
    aside = first.path / "results.1"
    assert f"of earlier checkpoints after step 2 are now in {aside}" in again.stdout
    [run] = read_runs([first.path])
    assert (run.evaluations, run.sample) == ([], None)
    names = {"analysis_step_00000004", "eval_step_00000004_piqa.json", "sample.json"}
    assert {path.name for path in aside.iterdir()} == names


def test_going_back_is_a_new_run_that_says_where_it_comes_from(train, tmp_path):
    first = train("train.steps=8")
    old = first.checkpoint(4)
    before = _content(first.path)
    back = f"--resume={old}"
    refused = train(back, "train.steps=8", status=1)
    remedy = f"does not go back to {old}: to start a new run from it, add --set name=NEW"
    assert remedy in refused.stderr
    assert "loading PyTorch" not in refused.stdout
    began = train(back, "name=new", "train.steps=6")
    assert f"new/: new, goes on from {old}" in began.stdout
    new = train(back, "name=new", "train.steps=8")  # as after a kill
    assert "new/: resumes from step_00000006" in new.stdout
    assert _content(first.path) == before

    assert _steps(new) == [5, 6, 7, 8]
    last = new.checkpoint(8)
    expected = checkpoint.read_kind(first.checkpoint(8), "model")
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
    assert [session["parent"] for session in new.records("session")] == [parent, parent]
    assert "<td>step 4 of debug</td>" in summary_table(read_runs([new.path]))
    export(last, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| goes on from | step 4 (1,024 tokens) of `debug`, counted above |" in card


def test_a_new_run_that_was_killed_before_it_saved_begins_again(train):
    back = [f"--resume={train().path}", "name=new", "train.steps=6"]
    train(*back, "checkpoint.every_steps=0")
    new = train(*back)
    assert "has records and no checkpoint: training begins at step 4" in new.stdout
    assert _steps(new) == [5, 6]
    assert '"kind": "train", "step": 6' in (new.path / "metrics.1.jsonl").read_text()


def test_a_run_whose_newest_checkpoint_was_moved_away_goes_on_from_the_one_before(train, tmp_path):
    first = train("train.steps=8")
    losses = first.losses()
    first.checkpoint(8).rename(tmp_path / "damaged")
    second = train("train.steps=8")
    assert "debug/: resumes from step_00000006" in second.stdout
    assert second.losses() == losses


@pytest.mark.parametrize("name", ["recipe.yaml", "trainer.json", "manifest.json"])
def test_damage_is_told_before_torch_is_loaded_with_the_checkpoint_before(train, tiny, name):
    older, newest = (
        saver.save(tiny().run_path / "checkpoints", _snapshot(step), keep=2) for step in (2, 4)
    )
    path = newest / name
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))
    refused = train(status=1)
    assert "loading PyTorch" not in refused.stdout
    offer = f"{older} is the newest complete checkpoint before it. Move step_00000004"
    assert offer in refused.stderr


def test_a_finished_run_with_wsd_goes_on_at_the_same_learning_rate(train):
    overrides = ["optimizer.schedule=wsd", "optimizer.decay_steps=2"]
    overrides += ["checkpoint.every_steps=5", "checkpoint.keep=1"]
    first = train(*overrides, "train.steps=8")
    before_decay = first.checkpoint(6)
    saved = checkpoint.checkpoints_in(first.path / "checkpoints")
    assert saved == [before_decay, first.checkpoint(8)]
    new = train(*overrides, f"--resume={before_decay}", "name=new", "train.steps=12")
    assert "the learning rate changes" not in new.stdout
    peak = new.recipe.optimizer.learning_rate
    rates = {record["step"]: record["learning_rate"] for record in new.records("train")}
    assert rates == {**dict.fromkeys(range(7, 12), peak), 12: pytest.approx(peak * 0.5)}
    in_place = train(*overrides, "train.steps=12")
    assert "--resume …/step_00000006 --set name=NEW" in in_place.stdout
