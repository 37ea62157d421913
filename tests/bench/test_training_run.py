"""Whole training runs: their arithmetic on made-up records, their processes, and one real one."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import types

import pytest
import torch
from conftest import set_arguments

from listing import listing
from sparsellm.bench import model_forward, timing, train_plan, training_run
from sparsellm.bench.record import read
from sparsellm.bench.train_figures import figures, measurements, row
from sparsellm.bench.train_plan import Plan, Side, combinations
from sparsellm.recipe import load_recipe
from sparsellm.runs.pretrained import find_checkpoint


def record(step, rate=1000.0, *, sparse=(False, False), nnz=20.0, loss=3.0, **others):
    """A line of metrics.jsonl, as far as it is read."""
    return {
        "step": step,
        "tokens_per_second": rate,
        "mfu": rate / 1e4,
        "memory_gib": 40.0 - step / 10,
        "loss": loss,
        "sparsity": {"nnz_mean": [nnz - 5, nnz + 5]},
        "kernels": {"sparse": list(sparse), "union_mean": [100.0, 300.0]},
        "seconds": float(step),
        **others,
    }


def plan(tmp_path, **values):
    sides = combinations([1, 2], ["ddp8"], ["auto", "dense"])
    wanted = {"recipe": "debug", "overrides": [], "sides": sides, "steps": 8}
    return Plan(**(wanted | {"folder": tmp_path} | values))


def test_figures_are_of_the_second_half_without_steps_that_change_paths():
    first, then = (False, False), (True, False)
    records = [record(step, 10.0) for step in (1, 2, 3, 4, 5)]
    rates = {6: 1000.0, 7: 1100.0, 8: 3.0, 9: 1300.0, 10: 1400.0}
    records += [record(s, r, sparse=first if s < 8 else then) for s, r in rates.items()]
    # Step 7 and 8 were seen together.
    energy = {2: 10, 5: 1_000, 6: 3_000, 8: 6_000, 10: 11_000}
    found = figures(records, energy, tokens_a_step=100)
    assert found.tokens_per_ms == 1.2  # of 1000, 1100, 1300, 1400
    assert found.mfu == pytest.approx(0.12)
    assert found.mj_per_token == 10_000 / 500
    assert found.sparse_layers == 1
    assert (found.union_mean, found.nnz, found.loss) == (200.0, 20.0, 3.0)
    assert found.memory_gib is None  # the room for patterns has not shrunk yet
    dense = [record(step) for step in range(1, 11)]
    assert figures(dense, {}, 100).memory_gib == 39.0
    assert figures(dense, {}, 100).mj_per_token is None
    assert figures(dense, {}, 100, on_gpu=False).memory_gib is None
    long = [record(step, sparse=then) for step in range(1, 41)]
    assert figures(long, {}, 100).memory_gib == 36.0


def test_sparsity_that_changes_is_refused():
    falling = [record(step, nnz=200.0 / step) for step in range(1, 9)]
    with pytest.raises(ValueError, match=r"not settled: 36\.7 → 26\.8 non-zeros.*--settle-steps"):
        figures(falling, {}, 100)
    assert figures(falling, {}, 100, settles=False).tokens_per_ms == 1.0
    flapping = [record(step, sparse=(step % 2 == 0, False)) for step in range(1, 9)]
    with pytest.raises(ValueError, match="only 0 of the last 4 steps took the same paths"):
        figures(flapping, {}, 100)


def test_ratios_and_efficiency():
    def of(rate, memory, mj):
        return types.SimpleNamespace(
            tokens_per_ms=rate, mfu=None, memory_gib=memory, mj_per_token=mj, sparse_layers=2,
            union_mean=1.0, nnz=2.0, loss=3.0,
        )  # fmt: skip

    found = measurements({"gpus": 4}, of(600.0, 20.0, 2.0), of(400.0, 30.0, 3.0), of(160.0, 1, 1))
    by_metric = {m.metric: (m.value, m.baseline, m.ratio) for m in found}
    assert by_metric["tokens_per_ms"] == (600.0, 400.0, 1.5)
    assert by_metric["tokens_per_ms_a_gpu"] == (150.0, 160.0, 0.9375)
    assert by_metric["memory_GiB"] == (20.0, 30.0, 1.5)
    assert by_metric["mJ_per_token"] == (2.0, 3.0, 1.5)
    assert by_metric["loss"] == (3.0, None, None)
    assert "mfu" not in by_metric
    assert row(found).startswith("train gpus=4: tokens_per_ms 600 (1.50× of 400), ")


def test_what_others_are_held_against_comes_first():
    sides = combinations([4, 1, 4], ["ddp8", "fsdp2", "ddp8"], ["auto", "dense"])
    names = [str(side) for side in sides]
    assert names[:2] == ["single × 1, dense", "single × 1, auto"]
    assert names[2:4] == ["ddp8 × 4, dense", "ddp8 × 4, auto"]
    assert names[4:] == ["fsdp2 × 4, dense", "fsdp2 × 4, auto"]


def test_each_format_is_a_run_and_dense_has_none(tmp_path):
    orders = [None, "auto"]
    sides = combinations([1], ["ddp8"], ["auto", "dense"], ["union", "twell"], token_orders=orders)
    names = [str(side) for side in sides]
    sparse = ["auto", "auto-order-auto", "auto-twell"]  # TwELL has no order
    assert names == [f"single × 1, {variant}" for variant in ("dense", *sparse)]
    formats = [plan(tmp_path).resolved(side).ffn.format for side in sides]
    assert formats == ["union", "union", "union", "twell"]


def test_orders_and_sizes_are_runs_with_the_dense_run_of_their_size_as_baseline(tmp_path):
    sides = combinations(
        [1], ["ddp8"], ["auto", "dense"], token_orders=["none", "auto"], micro_batch_sizes=[4, 8]
    )
    assert [side.variant for side in sides] == [
        "dense-batch-4",
        "dense-batch-8",
        "auto-order-none-batch-4",
        "auto-order-none-batch-8",
        "auto-order-auto-batch-4",
        "auto-order-auto-batch-8",
    ]
    assert sides[-1].baseline == sides[1]
    recipe = plan(tmp_path).resolved(sides[-1])
    assert (recipe.runtime.token_order, recipe.train.micro_batch_size) == ("auto", 8)


def test_a_run_is_quiet_and_holds_its_weights_unless_asked(tmp_path):
    side = Side(4, "ddp8", "auto")
    recipe = plan(tmp_path).resolved(side)
    assert recipe.optimizer == load_recipe("debug").optimizer
    asked = plan(
        tmp_path,
        settle_steps=10,
        tokens_per_gpu=4096,
        overrides=["validation.every_steps=3", "train.steps=99", "optimizer.min_lr_ratio=0.5"],
    ).resolved(side)
    assert (recipe.checkpoint.every_steps, recipe.validation.every_steps) == (0, 0)
    assert (asked.checkpoint.every_steps, asked.validation.every_steps) == (0, 3)
    assert (asked.train.steps, asked.train.global_batch_tokens) == (8, 16_384)
    assert (asked.optimizer.learning_rate, asked.optimizer.min_lr_ratio) == (1e-6, 0.5)
    assert (asked.ffn.kernels, asked.logging.every_steps) == ("auto", 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 5}, "--steps 5: at least 6"),
        ({"sides": [Side(2, "fsdp2", "dense")]}, "--config fsdp2: accelerate shards over CUDA"),
        (
            {"sides": [Side(2, "ddp", "dense")]},
            "--config ddp: no such file.*fsdp2, hsdp, single",
        ),
        ({"energy": True}, "needs a CUDA device"),
        ({"sides": [Side(3, "ddp8", "dense")]}, "is not a multiple of 3 ranks"),
        (
            {"overrides": ["train.micro_batch_size=auto"], "sides": [Side(1, "single", "dense")]},
            "is auto, which grows .* give sizes, such as --micro-batch-size 4 8",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_once(tmp_path, monkeypatch, values, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        train_plan.check(plan(tmp_path, **values))


def test_gpus_and_weights_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--gpus 2: this machine has 1"):
        train_plan.check(plan(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        train_plan.check(plan(tmp_path, init_from=tmp_path))


def test_one_failure_leaves_the_others_their_figures(tmp_path, monkeypatch):
    commands = []

    def watch(command, run_path, gpus=()):
        commands.append(command)
        sparse = "ffn.kernels=auto" in command
        two = "--num_processes=2" in command
        if two and not sparse:
            raise ValueError("the launch failed: out of memory")
        if run_path.name.startswith("settle"):
            folder = run_path / "checkpoints" / "step_00000005"
            folder.mkdir(parents=True)
            (folder.parent / "latest").write_text(folder.name)
        yield [record(1)]
        yield [record(s, 1000.0 * (1 + sparse) * (1 + 0.8 * two)) for s in range(1, 9)]

    monkeypatch.setattr(training_run, "watch", watch)
    monkeypatch.setattr(
        training_run.checkpoint, "latest", lambda path: next(path.glob("step*"), None)
    )
    asked = plan(tmp_path, sides=combinations([1, 2], ["ddp8"], ["dense", "auto"]))
    found = training_run.run(asked)
    alone, sparse, failure, two = (next(found) for _ in range(4))
    assert {m.metric: m.ratio for m in sparse}["tokens_per_ms"] == 2.0
    assert {m.metric: m.ratio for m in two}["tokens_per_ms_a_gpu"] == pytest.approx(0.9)
    assert {m.metric: m.ratio for m in two}["tokens_per_ms"] is None  # its baseline failed
    assert failure == "failed: ddp8 × 2, dense: the launch failed: out of memory"
    assert alone[0].case["config"] == "single"
    with pytest.raises(ValueError, match=r"1 failed \(ddp8 × 2, dense\)"):
        next(found)

    settled = plan(tmp_path, sides=[Side(1, "single", "dense")], settle_steps=5)
    first, *_ = training_run.run(settled)
    second, *_ = training_run.run(settled)
    assert first.startswith("settled: 20.0 non-zeros per token, loss 3.000: ")
    assert second == f"settled before: {first.rpartition(' ')[2]}"
    assert commands[-1][-2:] == ["--init-from", first.rpartition(" ")[2]]
    assert len(commands) == 4 + 2 + 1


def test_runs_at_once_have_a_gpu_each_and_are_not_measured_again(tmp_path, monkeypatch):
    places, together = [], threading.Barrier(2, timeout=10)

    def watch(command, run_path, gpus):
        together.wait()
        places.append(gpus)
        run_path.mkdir()
        sparse = "ffn.kernels=auto" in command
        records = [record(s, 1000.0 * (1 + sparse)) for s in range(1, 9)]
        lines = [json.dumps(r | {"kind": "train", "tokens": 1}) + "\n" for r in records]
        (run_path / "metrics.jsonl").write_text("".join(lines))
        yield records

    monkeypatch.setattr(training_run, "watch", watch)
    monkeypatch.setattr(training_run, "visible_gpus", lambda count: ["5", "7"])
    monkeypatch.setattr(training_run, "train_records", lambda run_path: [])
    asked = plan(tmp_path, sides=combinations([1], ["ddp8"], ["dense", "auto"]), parallel=True)
    _, sparse = training_run.run(asked)
    assert sorted(places) == [["5"], ["7"]]
    assert {m.metric: m.ratio for m in sparse}["tokens_per_ms"] == 2.0
    places.clear()
    _, again = training_run.run(asked)
    assert (again, places) == (sparse, [])
    late = dataclasses.replace(asked, overrides=["seed=3"], seconds=-1.0)
    found = training_run.run(late)
    assert "not started: the time limit has passed" in next(found) + next(found)
    with pytest.raises(ValueError, match="2 failed"):
        next(found)


@pytest.mark.long
@pytest.mark.slow
def test_a_real_run_and_its_checkpoints_forward(tiny_overrides, tmp_path, monkeypatch, cli_here):
    quiet = ("checkpoint.", "validation.every", "logging.")
    overrides = [o for o in tiny_overrides if not o.startswith(quiet)]
    folder, results = tmp_path / "bench", tmp_path / "results.jsonl"
    command = ["bench", "train", "--recipe", "debug"]
    command += ["--kernels", "dense", "--steps", "60", "--folder", str(folder)]
    command += ["--set", "checkpoint.every_steps=60"]
    command += [*set_arguments(overrides), "--record", str(results)]
    done = cli_here(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {r["metric"]: r for r in read(results)}
    case = records["tokens_per_ms"]["case"]
    assert (case["gpus"], case["config"], case["kernels"]) == (1, "single", "dense")
    assert records["tokens_per_ms"]["value"] > 0
    assert "memory_GiB" not in records
    listed = listing(read(results))
    assert listed.startswith("## train\n")
    assert "| tokens_per_ms |" in listed
    [runs] = folder.glob("runs-*")

    # Its checkpoint's forward, timed by the wall: there are no CUDA events here.
    def interleaved(sides, seconds):
        began = time.perf_counter()
        return {name: [call() for call in calls] and 1e3 * (time.perf_counter() - began)
                for name, calls in sides.items()}  # fmt: skip

    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    path = find_checkpoint(runs / "single-1-dense")
    recipe = load_recipe("debug", overrides)
    measured = model_forward.run(path, recipe, torch.device("cpu"), False, layers=True)
    found, [first], [second] = measured  # each is recorded before the next is measured
    assert [m.case["layer"] for m in (first, second)] == [0, 1]
    assert (first.bench, first.ratio > 0) == ("layer_forward", True)
    found = {m.metric: m for m in found}
    assert found["tokens_per_ms"].case["M"] == 2 * 32
    assert found["difference"].value < 0.02
    case = found["tokens_per_ms"].case
    assert json.dumps(case)
    assert (case["run"], case["step"], case["l1_coefficient"]) == (
        path.parent.parent.name,
        60,
        4e-3,
    )
    assert case["measured_nnz"] == pytest.approx(
        (first.case["measured_nnz"] + second.case["measured_nnz"]) / 2
    )
    assert 0 < case["measured_nnz"] <= first.case["N"] == 64
