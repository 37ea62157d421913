"""Steps and weights that are not finite: stopped or skipped, and never saved."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import save_run

from sparsellm.runs import checkpoint, state
from sparsellm.training import loop, nonfinite, step as step_module
from training.damaged_batch import spoil

DAMAGED = Path(__file__).with_name("damaged_batch.py")


@pytest.fixture
def nan_at(monkeypatch):
    """Makes the loss, and with it every gradient, NaN in some steps."""
    for module, name in ((loop, "train_step"), (step_module, "total_loss")):
        monkeypatch.setattr(module, name, getattr(module, name))  # so that it is restored
    return lambda *steps: spoil(steps.__contains__)


def test_a_step_that_is_not_finite_is_skipped_and_counted(train, nan_at):
    nan_at(3)
    result = train("train.steps=6", "train.on_nonfinite=skip", "sparsity.dead_window_tokens=256")
    pattern = (
        r"step 3 was skipped: loss [\d.]+, L1 [\d.]+, gradient norm nan \(1 in all; train.on_nonf"
    )
    assert re.search(pattern, result.stdout)
    assert "done: 6 steps (1 of them skipped), 1,536 tokens" in result.stdout
    assert [r["step"] for r in result.records("train")] == [1, 2, 4, 5, 6]
    [skipped] = result.records("failure")
    assert (skipped["step"], skipped["what"], skipped["tokens"]) == (3, "step", 768)
    last = result.checkpoint(6)
    saved = checkpoint.load(last)
    assert (saved.trainer["skipped"], saved.trainer["tokens"]) == (1, 6 * 256)
    assert state.first_nonfinite(checkpoint.read_kind(last, "optimizer")) is None
    moments = checkpoint.read_kind(last, "optimizer")
    assert {float(t) for name, t in moments.items() if name.startswith("step.")} == {5.0}
    stats = checkpoint.read_kind(last, "stats")
    assert stats["silent_tokens_LN"].max() <= 5 * 256  # in it no neuron was silent


def test_the_data_continues_after_it(build, nan_at):
    nan_at(1)
    stop = loop.StopRequest()
    runs = [build(f"train.on_nonfinite={choice}") for choice in ("skip", "stop")]
    skipped, plain = runs
    before = [p.clone() for p in skipped.model.parameters()]
    assert loop.train_step(skipped, stop).skipped
    assert all(torch.equal(p, b) for p, b in zip(skipped.model.parameters(), before, strict=True))
    for _ in range(plain.recipe.accumulation_steps(1)):
        next(plain.loader)
    plain.step = 1
    losses = [loop.train_step(run, stop).values["loss"] for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        ("ddp8.yaml", "adamw"),
        pytest.param("fsdp2.yaml", "adamw", marks=pytest.mark.long),
        pytest.param("fsdp2.yaml", "muon", marks=pytest.mark.long),
    ],
)
def test_a_step_of_several_ranks_is_skipped_though_the_next_has_begun(train_on, config, optimizer):
    overrides = ["train.on_nonfinite=skip", "checkpoint.every_steps=0"]
    overrides.append(f"optimizer.name={optimizer}")
    done = train_on(2, *overrides, program=(str(DAMAGED), "spoil", "1", "3"), config=config)
    assert "step 3 was skipped: loss " in done.stdout
    assert [r["step"] for r in done.records("train")] == [1, 2, 4]


def test_too_many_in_a_row_stop(train, nan_at, monkeypatch):
    monkeypatch.setattr(nonfinite, "MOST_SKIPPED", 2)
    nan_at(2, 3, 4)
    result = train("train.steps=6", "train.on_nonfinite=skip", status=1)
    assert "step 4: loss " in result.stderr
    assert "after 2 skipped steps in a row" in result.stderr


def test_after_too_many_spikes_a_higher_threshold_is_offered(build):
    run = build("train.spike_threshold=2")
    for _ in range(nonfinite.MOST_SKIPPED):
        run.skips.skip()
    finite = SimpleNamespace(metrics={"loss": 9e9, "l1": 0.0}, gradient_norm=1.0)
    with pytest.raises(FloatingPointError, match=r"rate, or raise train\.spike_threshold$"):
        nonfinite.reason_to_skip(run, finite)


def test_by_default_it_stops_and_the_advice_works(train, nan_at):
    nan_at(4)
    result = train("train.steps=6", status=1)
    assert "step 4: loss " in result.stderr
    advice = "Give the same command, with a lower optimizer.learning_rate, or skip such steps"
    assert f"{advice}: --set train.on_nonfinite=skip" in result.stderr
    again = train("train.steps=6", "train.on_nonfinite=skip", "optimizer.learning_rate=1e-4")
    assert "step 4 was skipped" in again.stdout


def test_weights_that_are_not_finite_are_not_saved(train):
    good = train().checkpoint(4)
    spoilt = train("train.steps=8", "optimizer.learning_rate=3e38", status=1)
    message = spoilt.stderr.strip().splitlines()[-1]
    assert "weights or optimizer state are not finite, such as" in message
    assert f"Last good checkpoint: {good}" in message
    assert checkpoint.latest(good.parent) == good
    assert state.first_nonfinite(checkpoint.read_kind(good, "model")) is None
    train("train.steps=6", "optimizer.learning_rate=1e-4")


def test_export_refuses_what_an_earlier_version_saved(build, cli_here, tmp_path):
    run = build()
    loop.train_step(run, loop.StopRequest())
    with torch.no_grad():
        run.model.model.layers[1].mlp.up_proj.weight[3, 4] = math.inf
    with pytest.raises(FloatingPointError, match=r"such as model.layers.1.mlp.up_proj.weight"):
        nonfinite.check_finite(run)
    path = save_run(run)
    result = cli_here("export", str(path), str(tmp_path / "out"), status=1)
    assert "model.layers.1.mlp.up_proj.weight has NaN or infinite values" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_way_back_is_before_the_first_step_that_was_skipped(train, nan_at, monkeypatch):
    monkeypatch.setattr(nonfinite, "MOST_SKIPPED", 3)
    nan_at(5, 6, 7, 8)
    command = ("train.steps=10", "train.on_nonfinite=skip", "checkpoint.keep=9")
    result = train(*command, status=1)
    # Those of steps 4 and 6 are of the weights that steps 5 to 8 could not be taken with.
    assert checkpoint.latest(result.path / "checkpoints") == result.checkpoint(6)
    back = f"--resume {result.checkpoint(2)} --set name=NEW"
    assert f"{back}, with a lower optimizer.learning_rate" in result.stderr
    # The count of steps in a row survives the restart.
    assert "step 8: loss " in train(*command, status=1).stderr


@pytest.mark.parametrize("keep", [1, 2])
def test_skipped_steps_do_not_push_out_the_last_good_checkpoint(train, nan_at, monkeypatch, keep):
    monkeypatch.setattr(nonfinite, "MOST_SKIPPED", 6)
    nan_at(*range(5, 12))
    command = ("train.steps=12", "train.on_nonfinite=skip", f"checkpoint.keep={keep}")
    result = train(*command, status=1)
    checkpoints = [result.checkpoint(step) for step in (2, 4, 10)][-keep - 1 :]
    assert checkpoint.checkpoints_in(result.path / "checkpoints") == checkpoints
    first = checkpoints[0]
    back = f"--resume {first} --set name=NEW"
    advice = f"No checkpoint has earlier weights than {first}: begin a new run from it ({back})"
    assert (advice if keep == 1 else f"{back}, with a lower") in result.stderr
    monkeypatch.undo()  # what was the cause is mended
    train(*command, "name=new", f"--resume={first}")


def test_without_a_checkpoint_the_run_starts_again(train, nan_at):
    nan_at(1)
    advice = "There is no checkpoint from before this step: start again with a lower"
    assert advice in train(status=1).stderr
    train("train.on_nonfinite=skip")
