"""The loop as a user runs it: killed, stopped, resumed, diverging, and told what is wrong."""

import random
import re
import shutil
import signal
import time

import pytest
import torch
from conftest import ROOT, set_arguments
from frozen_runs import TIMES
from warm import started

from sparsellm.processes.distributed import RankActivity
from sparsellm.recipe import load_recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.metrics import METRICS
from sparsellm.runs.telemetry.metrics_log import MetricsLog
from sparsellm.runs.telemetry.records import read_metrics
from sparsellm.training import loop as train_module
from sparsellm.training.resume.run_state import first_state
from sparsellm.training.step import forward


def _program(overrides):
    return ("-m", "sparsellm", "train", "--recipe", "debug", *set_arguments(overrides))


def _outcome(recipe):
    """Every recorded number but timings, and the last checkpoint's tensors."""
    records = [
        {key: value for key, value in record.items() if key not in TIMES}
        for record in read_metrics(recipe.run_path)
        if not record["kind"].startswith("session")
    ]
    recorded = {metric.name for metric in METRICS if metric.of is None}
    assert all(recorded <= record.keys() | TIMES for record in records if record["kind"] == "train")
    path = checkpoint.latest(recipe.run_path / "checkpoints")
    tensors = {k: checkpoint.read_kind(path, k) for k in ("model", "optimizer", "stats")}
    return records, checkpoint.load(path), tensors, checkpoint.data_states(path)


def _whole_and_resumed(train, overrides, last):
    """The outcomes of a run, and of the same run resumed as if killed before step ``last``."""
    outcomes = []
    for _ in range(2):
        done = train(*overrides)
        outcomes.append(_outcome(done.recipe))
        shutil.rmtree(done.checkpoint(last))
    assert "resuming from" in done.stdout
    return outcomes


def _assert_same(one, other):
    records, _, kinds, positions = one
    assert other[0] == records
    for part, tensors in kinds.items():
        other_state = other[2][part]
        assert tensors.keys() == other_state.keys()
        assert all(torch.equal(tensors[name], other_state[name]) for name in tensors), part
    assert positions == other[3]


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(tiny_overrides, train, train_on):
    overrides = ["train.steps=60", "checkpoint.every_steps=1000"]
    overrides += ["data.num_workers=2", "sparsity.reinit_rate=0.1"]
    stopped, lines = [*tiny_overrides, *overrides, "name=stopped"], []
    with started(*_program(stopped)) as (process, printed):
        for line in printed:
            lines.append(line)
            if line.startswith("step 10/"):
                process.send_signal(signal.SIGTERM)
        assert process.wait() == 0, "".join(lines)
    assert "(SIGTERM); the same command resumes here" in lines[-1]
    assert "step 60/60" not in "".join(lines)
    resumed = train_on(1, *overrides, "name=stopped")
    assert "resuming from" in resumed.stdout
    straight = train(*overrides, "name=straight")
    _assert_same(_outcome(straight.recipe), _outcome(resumed.recipe))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigkills_change_nothing(tiny_overrides, train, train_on):
    """Bit-identical losses, statistics and weights after kills at random instants."""
    overrides = ["train.steps=32", "checkpoint.every_steps=1"]
    overrides += ["validation.every_steps=7", "data.num_workers=1"]
    killed = [*tiny_overrides, *overrides, "name=killed"]
    chance = random.Random(4)
    killed_at = []
    for _ in range(4):
        steps_to_see = chance.randint(1, 7)
        with started(*_program(killed)) as (process, printed):
            for line in printed:
                steps_to_see -= line.startswith("step ")
                if steps_to_see == 0:
                    # Most of a step of this tiny model is the writing of its checkpoint.
                    time.sleep(chance.uniform(0, 0.05))
                    killed_at.append(line)
                    process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, killed_at
    finished = train_on(1, *overrides, "name=killed")
    assert "resuming from" in finished.stdout
    straight = train(*overrides, "name=straight")
    _assert_same(_outcome(straight.recipe), _outcome(finished.recipe))


def test_between_progress_lines_a_terminal_shows_the_step(train, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    done = train("train.steps=4", "logging.every_steps=4", "validation.every_steps=4")
    assert re.findall(r"\rstep (\d)/4 … +\r", done.stderr) == ["0", "1", "2", "3"]
    assert re.search(r"\rstep 4 \| validation … +\r", done.stderr)
    assert re.findall(r"^step (\d)/4 \| loss", done.stdout, re.MULTILINE) == ["1", "4"]


def test_what_a_rank_does_is_told_and_records_are_on_disk_before_a_checkpoint(train, monkeypatch):
    """Other ranks name it if it hangs; a record of a step that a checkpoint has is never lost."""
    phases = []
    begin, sync, save = RankActivity.begin, MetricsLog.sync, train_module.begin_save
    monkeypatch.setattr(
        RankActivity, "begin", lambda self, *phase: (phases.append(phase), begin(self, *phase))
    )
    monkeypatch.setattr(MetricsLog, "sync", lambda self: (phases.append("synced"), sync(self)))
    monkeypatch.setattr(
        train_module, "begin_save", lambda run: (phases.append("checkpoint"), save(run))
    )
    overrides = ["train.steps=2", "train.micro_batch_size=8", "validation.every_steps=2"]
    train(*overrides, "runtime.compile=false")
    phases = phases[phases.index(("reading data", 0)) :]

    second_step = [("reading data", 1), ("computing", 1)]  # of the second step, within the first
    wait = "summing over ranks"
    steps = [("computing", 0), (wait, 0), *second_step, (wait, 0), ("between steps", 1)]
    steps += [(wait, 1), ("between steps", 2)]
    after = [("saving", 2), "synced", "checkpoint", ("validation", 2)]
    assert phases[1 : 1 + len(steps) + len(after)] == [*steps, *after]


def test_sparse_kernels_train_to_the_losses_of_dense_ones(train):
    overrides = ["train.steps=15", "sparsity.l1_coefficient=0.1"]
    overrides += ["runtime.activation_checkpointing=true"]
    outcomes = []
    for kernels in ("dense", "sparse"):
        done = train(*overrides, f"ffn.kernels={kernels}", f"name={kernels}")
        outcomes.append(_outcome(done.recipe)[0])
    first, same = outcomes[0][0], outcomes[1][0]
    assert first["sparsity"] == same["sparsity"]  # the same weights: exactly
    assert first["kernels"]["union_mean"] == same["kernels"]["union_mean"]
    for dense, sparse in zip(*outcomes, strict=True):
        assert sparse["loss"] == pytest.approx(dense["loss"], rel=1e-4)
        if dense["kind"] == "train":
            assert sparse["l1"] == pytest.approx(dense["l1"], rel=1e-3)
            assert sparse["grad_norm"] == pytest.approx(dense["grad_norm"], rel=1e-3)
            assert sparse["sparsity"]["nnz_mean"] == pytest.approx(
                dense["sparsity"]["nnz_mean"], rel=1e-3
            )
            assert dense["kernels"]["sparse"] == [False, False]
            assert sparse["kernels"]["sparse"] == [True, True]


@pytest.mark.slow
def test_sparse_kernels_resume_to_the_same_bits(train):
    """… though a resumed run reserves for the worst case, where the other's patterns overflow."""
    overrides = ["ffn.kernels=sparse", "model.intermediate_size=2048"]
    overrides += ["sparsity.l1_coefficient=0.02", "optimizer.min_lr_ratio=1", "train.steps=38"]
    overrides += ["checkpoint.every_steps=32", "validation.every_steps=32"]
    outcomes = _whole_and_resumed(train, overrides, last=38)
    for record in (*outcomes[0][0], *outcomes[1][0]):
        record.get("kernels", {}).pop("overflows", None)
    _assert_same(*outcomes)


def test_dropout_in_attention_resumes_to_the_same_bits(train):
    dropout = ["model.huggingface={attention_dropout: 0.2}"]
    _assert_same(*_whole_and_resumed(train, dropout, last=4))


def test_dropout_follows_from_the_seed_and_the_rank(build, monkeypatch):
    """Not from what the process has drawn before, such as for another run of a sweep."""

    def first_loss(rank=0, seed=0):
        run = build("model.huggingface={attention_dropout: 0.5}", f"seed={seed}")
        with monkeypatch.context() as patch:
            patch.setattr(type(run.accelerator), "process_index", rank)
            first_state(run, None, None)
        return forward(run, torch.arange(66).view(2, 33)).cross_entropy_sum.item()

    once = first_loss()
    torch.rand(3)
    assert first_loss() == once
    assert first_loss(rank=1) != once
    assert first_loss(seed=2**64 - 1) != once


@pytest.mark.slow
def test_divergence_stops_with_the_last_good_checkpoint_named(train):
    """The last step's own checkpoint would give the same numbers again."""
    saves = "checkpoint.every_steps=1"
    good = train(saves, "train.steps=3").checkpoint(3)
    steep = ["optimizer.learning_rate=1e30", "optimizer.clip_norm=1e30"]
    diverged = train(saves, "train.steps=20", *steep, status=1)
    last = diverged.stderr.strip().splitlines()[-1]
    assert last.startswith("error: step ")
    assert "the weights were not changed. Last good checkpoint: " in last
    assert f"--resume {good}" in last
    weights = checkpoint.read_kind(good, "model").values()
    assert all(bool(w.isfinite().all()) for w in weights)


def test_resume_says_what_the_recipe_changed_and_continues(train):
    first = checkpoint.load(train().checkpoint(4))
    longer = train("train.steps=6")
    assert "changed since the checkpoint: train.steps 4 → 6" in longer.stdout
    records, snapshot, *_ = _outcome(longer.recipe)
    assert snapshot.step == 6
    assert first.manifest.id in snapshot.manifest.ancestors
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    changes = [session.get("changes") for session in longer.records("session")]
    assert changes == [None, ["train.steps 4 → 6"]]
    again = train("train.steps=6", "sparsity.l1_coefficient=9")
    assert "nothing to do: this run has done 6 steps of train.steps 6" in again.stdout
    written = load_recipe(str(again.path / "recipe.yaml"))
    assert written.sparsity.l1_coefficient != 9  # what trained stays written


def test_tokens_are_counted_where_the_batch_changes(train):
    train()
    larger = train("train.steps=6", "train.global_batch_tokens=512")
    assert "done: 6 steps, 2,048 tokens" in larger.stdout
    records, snapshot, *_ = _outcome(larger.recipe)
    tokens = [r["tokens"] for r in records if r["kind"] == "train"]
    assert tokens == [256, 512, 768, 1024, 1536, 2048]
    assert snapshot.trainer["tokens"] == 2048


def test_text_is_read_while_the_model_compiles_and_a_run_that_is_over_compiles_nothing(
    train, monkeypatch
):
    readers, warm_up = [], train_module.rehearsal.warm_up

    def observed(run):
        readers.append(len(run.loader.worker_pids))
        warm_up(run)

    monkeypatch.setattr(train_module.rehearsal, "warm_up", observed)
    for _ in range(2):
        train("data.num_workers=1")
    assert readers == [1]


def test_resume_takes_a_run_and_a_stop_says_how_to_go_on(train, monkeypatch):
    line = train_module.progress_line

    def stop_at_3(record, recipe):
        if record.step == 3:
            signal.raise_signal(signal.SIGUSR1)
        return line(record, recipe)

    monkeypatch.setattr(train_module, "progress_line", stop_at_3)
    fresh = train("train.steps=6", "--fresh")
    assert "without --fresh the same command resumes here" in fresh.stdout
    resumed = train("train.steps=6", f"--resume={fresh.path}")
    assert f"resuming from {fresh.checkpoint(4)}" in resumed.stdout
    assert "done: 6 steps" in resumed.stdout


def test_fresh_moves_nothing_before_the_new_run_can_start(train, tmp_path):
    run_path = train().path
    before = sorted(run_path.rglob("*"))
    typo = train("--fresh", f"--init-from={tmp_path / 'typo'}", status=1)
    assert "is not a checkpoint" in typo.stderr
    assert sorted(run_path.rglob("*")) == before


def test_other_data_in_the_run_folder_is_refused_with_what_changed(train):
    train()
    files = [f"data.files={ROOT / 'README.md'}", "data.corpus=local", "validation.every_steps=0"]
    other = train(*files, "train.steps=9", status=1)
    assert "(changed since the checkpoint: data.corpus sample → local, data.files" in other.stderr
    assert "validation" not in other.stderr


def test_fresh_trains_a_model_of_other_shapes_in_the_run_folder(train):
    train()
    wider = "model.intermediate_size=96"
    train(wider, status=1)
    fresh = train(wider, "--fresh")
    assert "the earlier run is now" in fresh.stdout
    assert (fresh.path.with_name("debug.1") / "metrics.jsonl").is_file()


def test_ctrl_c_prints_no_traceback(cli_here, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparsellm.recipe.load_recipe", interrupted)
    assert cli_here("recipe", "list", status=130).stderr == "interrupted\n"


def test_recipe_show_takes_as_many_gpus_as_the_batch_divides_over(cli_here):
    shown = cli_here("recipe", "show", "--recipe", "debug")
    assert "2 GPUs × 1 micro-batch × 16 sequences × 256 tokens" in shown.stdout
    assert re.search(r"^# tokens in all +983,040$", shown.stdout, re.MULTILINE)


def test_recipe_show_is_a_recipe_with_its_counts(cli_here, tmp_path):
    shown = cli_here("recipe", "show", "--recipe", "0.5b", "--set", "train.micro_batch_size=8")
    assert re.search(r"^# parameters +514,099,200 ", shown.stdout, re.MULTILINE)
    assert "8 GPUs × 8 micro-batches × 8 sequences × 2048 tokens" in shown.stdout
    path = tmp_path / "shown.yaml"
    path.write_text(shown.stdout, encoding="utf-8")
    assert load_recipe(str(path)).train.micro_batch_size == 8
