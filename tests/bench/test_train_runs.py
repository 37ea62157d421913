"""Whole training runs: their arithmetic on made-up records, and one real one."""

import json
import os
import signal
import sys
import threading
import time

import psutil
import pytest
import torch
from conftest import set_arguments
from rank_processes import wait_until_gone

from results import read_records
from sparsellm.bench import model_forward, train_runs
from sparsellm.bench.timing import Reading
from sparsellm.bench.train_figures import Figures, figures, measurements
from sparsellm.bench.train_runs import DENSE, Setting, check, measure, recipe_of, settings
from sparsellm.paths import REFERENCE_VARIABLE
from sparsellm.recipe import load_recipe
from sparsellm.runs.checkpoint import Snapshot
from sparsellm.runs.huggingface.find import find_checkpoint
from sparsellm.runs.saver import save

from .conftest import options

AUTO = "ffn.kernels=auto"


def record(step, rate=1000.0, *, sparse=(False, False), nnz=20.0, loss=3.0, **values):
    """A line of metrics.jsonl, as far as it is read."""
    return {
        "step": step,
        "tokens_per_second": rate,
        "mfu": rate / 1e4,
        "mfu_dense": rate / 1e3,
        "memory_gib": 40.0 - step / 10,
        "loss": loss,
        "sparsity": {"nnz_mean": [nnz - 5, nnz + 5]},
        "kernels": {"sparse": list(sparse), "union_mean": [100.0, 300.0]},
        "seconds": float(step),
        **values,
    }


def asked(*words):
    return options("train", "--recipe", "debug", "--steps", "8", *words)


def test_figures_are_of_the_second_half_without_steps_that_change_paths():
    first, then = (False, False), (True, False)
    records = [record(step, 10.0) for step in (1, 2, 3, 4, 5)]
    rates = {6: 1000.0, 7: 1100.0, 8: 3.0, 9: 1300.0, 10: 1400.0}
    records += [record(s, r, sparse=first if s < 8 else then) for s, r in rates.items()]
    # Step 7 and 8 were seen together.
    energy = {2: 10, 5: 1_000, 6: 3_000, 8: 6_000, 10: 11_000}
    readings = [Reading(step, mj, 1400 + step) for step, mj in energy.items()]
    run_figures = figures(records, readings, tokens_a_step=100)
    values = run_figures.values
    assert values["tokens_per_ms"] == pytest.approx(1.2)  # of 1000, 1100, 1300, 1400
    watts = 10_000 / 500 * 1.2  # mJ per token · tokens per ms
    assert run_figures.sustained == pytest.approx(
        {"p10": 1.03, "p90": 1.37, "watts": watts, "sm_mhz": 1407}
    )
    assert (values["mfu"], values["mfu_dense"]) == pytest.approx((0.12, 1.2))
    assert values["mJ_per_token"] == 10_000 / 500
    assert values["sparse_layers"] == 1
    assert (values["union_mean"], values["nnz"], values["loss"]) == (200.0, 20.0, 3.0)
    assert "memory_GiB" not in values  # the room for patterns has not shrunk yet
    dense = [record(step) for step in range(1, 11)]
    assert figures(dense, [], 100).values["memory_GiB"] == 39.0
    assert "mJ_per_token" not in figures(dense, [], 100).values
    assert "memory_GiB" not in figures(dense, [], 100, on_gpu=False).values
    long = [record(step, sparse=then) for step in range(1, 41)]
    assert figures(long, [], 100).values["memory_GiB"] == 36.0


def test_sparsity_that_changes_is_refused():
    falling = [record(step, nnz=200.0 / step) for step in range(1, 9)]
    with pytest.raises(
        ValueError, match=r"not in its steady state: 36\.7 → 26\.8 non-zeros.*--init-from"
    ):
        figures(falling, [], 100)
    assert figures(falling, [], 100, checks_steady_state=False).values["tokens_per_ms"] == 1.0
    flapping = [record(step, sparse=(step % 2 == 0, False)) for step in range(1, 9)]
    with pytest.raises(ValueError, match="only 0 of the last 4 steps took the same paths"):
        figures(flapping, [], 100)


def test_ratios_and_efficiency():
    def of(rate, memory, mj):
        values = {"tokens_per_ms": rate, "memory_GiB": memory, "mJ_per_token": mj, "loss": 3.0}
        return Figures(values, {"p10": rate - 1, "p90": rate + 1})

    rows = measurements({"gpus": 4}, of(600.0, 20.0, 2.0), of(400.0, 30.0, 3.0), of(160.0, 1, 1))
    by_metric = {m.metric: (m.value, m.baseline, m.ratio) for m in rows}
    assert by_metric["tokens_per_ms"] == (600.0, 400.0, 1.5)
    assert by_metric["tokens_per_ms_a_gpu"] == (150.0, 160.0, 0.9375)
    assert by_metric["memory_GiB"] == (20.0, 30.0, 1.5)
    assert by_metric["mJ_per_token"] == (2.0, 3.0, 1.5)
    assert by_metric["loss"] == (3.0, None, None)
    assert "mfu" not in by_metric
    assert rows[0].sustained == {"p10": 599, "p90": 601}
    assert rows[0].baseline_sustained == {"p10": 399, "p90": 401}


def test_what_others_are_held_against_comes_first():
    in_order = settings(asked("--gpus", "4", "1", "4", "--config", "ddp8", "fsdp2", "ddp8"))
    assert in_order == [
        Setting(gpus, config, side)
        for gpus, config in ((1, "single"), (4, "ddp8"), (4, "fsdp2"))
        for side in (DENSE, AUTO)
    ]


def test_a_side_is_any_keys_and_another_case():
    twell = f"{AUTO},ffn.format=twell"
    none, fused = f"{AUTO},runtime.token_order=none", f"{AUTO},runtime.weight_gradients=fused"
    dense_fp8 = f"{DENSE},runtime.precision=fp8"
    parsed = asked("--side", AUTO, twell, none, fused, dense_fp8)
    dense, *compared = settings(parsed)
    assert dense.side == DENSE
    cases = [train_runs._case(parsed, setting) for setting in compared]
    keys = [set(case) - set(train_runs._case(parsed, dense)) for case in cases]
    # By default tokens are ordered, which makes no difference to TwELL.
    assert keys == [{"token_order"}, {"format"}, set(), {"token_order", "weight_gradients"}, set()]
    assert [case["precision"] for case in cases] == ["fp32"] * 4 + ["fp8"]
    assert recipe_of(parsed, compared[1]).ffn.format == "twell"


def test_a_case_has_the_model_of_the_weights(tiny, tmp_path):
    recipe = tiny()
    snapshot = Snapshot(1, {}, {"step": 1}, recipe.to_yaml())
    parsed = asked("--init-from", str(save(tmp_path, snapshot, keep=1)))
    case = train_runs._case(parsed, settings(parsed)[0])
    assert case["layers"] == recipe.model.num_hidden_layers == 2
    assert case["recipe"] == "debug"


def test_a_run_is_quiet_and_holds_its_weights_unless_asked(tmp_path):
    side = Setting(4, "ddp8", AUTO)
    recipe = recipe_of(asked(), side)
    assert recipe.optimizer == load_recipe("debug").optimizer
    overrides = ["validation.every_steps=3", "train.steps=99", "optimizer.min_lr_ratio=0.5"]
    words = ["--init-from", str(tmp_path), "--tokens-per-gpu", "4096", *set_arguments(overrides)]
    held = recipe_of(asked(*words), side)
    assert (recipe.checkpoint.every_steps, recipe.validation.every_steps) == (0, 0)
    assert (held.checkpoint.every_steps, held.validation.every_steps) == (0, 3)
    assert (held.train.steps, held.train.global_batch_tokens) == (8, 16_384)
    assert (held.optimizer.learning_rate, held.optimizer.min_lr_ratio) == (1e-6, 0.5)
    assert (held.ffn.kernels, held.logging.every_steps) == ("auto", 1)


def test_a_run_holds_the_gates_beside_muon_too(tmp_path):
    content = {"base": "debug", "optimizer": {"name": "muon", "gate_learning_rate": 1e-3}}
    (tmp_path / "own.yaml").write_text(json.dumps(content))
    words = ["train", "--recipe", str(tmp_path / "own.yaml"), "--init-from", str(tmp_path)]
    held = recipe_of(options(*words), Setting(1, "single", AUTO)).optimizer
    assert (held.name, held.learning_rate) == ("muon", 1e-6)
    assert held.gate_lr_scale == 1 / 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "5"], "--steps 5: at least 6"),
        (["--gpus", "2", "--config", "fsdp2"], "--config fsdp2: accelerate shards over CUDA"),
        (["--gpus", "2", "--config", "ddp"], "--config ddp: no such file.*fsdp2, hsdp, single"),
        (["--gpus", "3"], "is not a multiple of 3 ranks"),
        (["--side", "ffn.kernel=auto"], "ffn.kernel"),
        (["--side", "ffn.kernels=sparse"], "--side ffn.kernels=sparse needs a GPU.*: leave it out"),
        (
            ["--set", "train.micro_batch_size=auto"],
            "is auto, which grows .* give a size, such as --set train.micro_batch_size=8",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_once(monkeypatch, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(REFERENCE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=message):
        check(asked(*words))


def test_gpus_and_weights_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--gpus 2: this machine has 1"):
        check(asked("--gpus", "2"))
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        check(asked("--init-from", str(tmp_path)))


@pytest.fixture
def launches(monkeypatch):
    """Commands of launches that end at once with made-up records; dense on two GPUs fails."""
    commands = []

    def watch(command, run_path, gpus=()):
        commands.append(command)
        sparse, two = AUTO in command, "--num_processes=2" in command
        if two and not sparse:
            raise ValueError("the launch failed: out of memory")
        yield [record(1)]
        yield [record(s, 1000.0 * (1 + sparse) * (1 + 0.8 * two)) for s in range(1, 9)]

    monkeypatch.setattr(train_runs, "watch", watch)
    return commands


def test_one_failure_leaves_the_others_their_figures(launches, capsys):
    measured = measure(asked("--gpus", "1", "2"))
    alone, sparse, two = (next(measured) for _ in range(3))
    assert alone[0].case["config"] == "single"
    assert {m.metric: m.ratio for m in sparse}["tokens_per_ms"] == 2.0
    assert {m.metric: m.ratio for m in two}["tokens_per_ms_a_gpu"] == pytest.approx(0.9)
    assert {m.metric: m.ratio for m in two}["tokens_per_ms"] is None  # its baseline failed
    output = capsys.readouterr().out
    assert output == f"failed: ddp8 × 2, {DENSE}: the launch failed: out of memory\n"
    with pytest.raises(ValueError, match=r"1 failed \(ddp8 × 2, ffn.kernels=dense\)"):
        next(measured)


@pytest.mark.parametrize(
    ("side", "on_gpu", "is_refused"),
    [(AUTO, True, True), (AUTO, False, False), (f"{DENSE},runtime.precision=bf16", True, False)],
)
def test_sparsity_must_be_steady_only_where_kernels_depend_on_it(
    monkeypatch, side, on_gpu, is_refused, capsys
):
    def watch(command, run_path):
        yield [record(s, nnz=200.0 / s) for s in range(1, 9)]

    monkeypatch.setattr(train_runs, "watch", watch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(train_runs, "counters", lambda gpu: None)
    monkeypatch.setattr(train_runs, "hardware", lambda: "1× A")
    measured = measure(asked("--side", side))
    if is_refused:
        with pytest.raises(ValueError, match="1 failed"):
            list(measured)
        assert "not in its steady state" in capsys.readouterr().out
    else:
        assert len(list(measured)) == 2


def test_what_was_measured_is_kept_in_the_folder(tmp_path, launches):
    parsed = asked("--folder", str(tmp_path / "kept"))
    first = list(measure(parsed))
    assert len(launches) == 2
    assert list(measure(parsed)) == first
    assert len(launches) == 2
    list(measure(asked("--folder", str(tmp_path / "kept"), "--set", "seed=3")))
    assert len(launches) == 4


def test_figures_of_another_recipe_machine_or_checkpoint_are_not_taken(
    tmp_path, launches, monkeypatch
):
    recipe, machine = tmp_path / "own.yaml", ["1× A"]
    monkeypatch.setattr(train_runs, "hardware", lambda: machine[0])
    monkeypatch.setattr(train_runs, "find_checkpoint", lambda path: (path / "latest").read_text())
    monkeypatch.setattr(train_runs, "_case", lambda options, setting: {"gpus": 1})
    parsed = options("train", "--recipe", str(recipe), "--steps", "8")
    parsed.folder, parsed.init_from = tmp_path / "kept", tmp_path
    recipe.write_text("base: debug\n")
    (tmp_path / "latest").write_text("step_1")
    list(measure(parsed))
    recipe.write_text("base: debug\nmodel: {num_hidden_layers: 3}\n")
    list(measure(parsed))
    assert len(launches) == 4
    machine[0] = "1× B"
    list(measure(parsed))
    assert len(launches) == 6
    (tmp_path / "latest").write_text("step_2")
    list(measure(parsed))
    assert len(launches) == 8
    list(measure(parsed))
    assert len(launches) == 8


def test_a_bench_told_to_end_ends_what_it_launched(tmp_path, monkeypatch):
    started = tmp_path / "started"
    child = (
        f"import os, time; open({str(started)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(60)"
    )
    launcher = (  # as torchrun does, it gives its child a session of its own
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)\n"
    )
    command = [sys.executable, "-c", launcher, "train"]
    monkeypatch.setattr(train_runs, "train_command", lambda *_: command)

    def end_the_bench():
        while not (started.exists() and started.read_text().endswith(" ")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=end_the_bench, daemon=True).start()
    try:
        with pytest.raises(SystemExit):
            list(measure(asked()))
    finally:
        signal.signal(signal.SIGTERM, handler)
    left = [psutil.Process(pid) for pid in (int(started.read_text()),) if psutil.pid_exists(pid)]
    assert not wait_until_gone(left, seconds=0)


@pytest.mark.long
def test_a_real_run_and_its_checkpoints_forward(tiny_overrides, tmp_path, monkeypatch, cli_here):
    quiet = ("checkpoint.", "validation.every", "logging.", "name=")
    overrides = [o for o in tiny_overrides if not o.startswith(quiet)]
    folder, results = tmp_path / "bench", tmp_path / "results.jsonl"
    command = ["bench", "train", "--recipe", "debug", "--side", DENSE]
    command += ["--steps", "60", "--folder", str(folder), "--set", "checkpoint.every_steps=60"]
    command += [*set_arguments(overrides), "--record", str(results)]
    cli_here(*command)
    records = {r["metric"]: r for r in read_records(results)}
    case = records["tokens_per_ms"]["case"]
    assert (case["recipe"], case["gpus"], case["config"]) == ("debug", 1, "single")
    assert records["tokens_per_ms"]["value"] >= records["tokens_per_ms"]["sustained"]["p10"] > 0
    assert "memory_GiB" not in records

    monkeypatch.setattr(torch, "compile", lambda model: model)
    [run] = [path for path in folder.glob("runs-*/single-1-*") if path.is_dir()]
    path = find_checkpoint(run)
    parsed = options("forward", str(path), "--seconds", "0.01", "--layers")
    measured = model_forward.measure(parsed, torch.device("cpu"))
    of_model, [first, *_], [second, *_] = measured  # each is recorded before the next is measured
    assert [m.case["layer"] for m in (first, second)] == [0, 1]
    assert (first.bench, first.ratio > 0) == ("layer_forward", True)
    of_model = {m.metric: m for m in of_model}
    assert of_model["difference"].value < 0.02
    case = of_model["tokens_per_ms"].case
    assert json.dumps(case)
    assert (case["M"], case["run"], case["step"]) == (2 * 32, path.parent.parent.name, 60)
    assert case["l1_coefficient"] == 4e-3
    layers = [first.case["measured_nnz"], second.case["measured_nnz"]]
    assert case["measured_nnz"] == pytest.approx(sum(layers) / 2)
    assert 0 < case["measured_nnz"] <= first.case["N"] == 64
