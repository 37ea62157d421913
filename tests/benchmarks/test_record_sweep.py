"""What is recorded of a sweep: how its runs ended, and when their target was reached for good."""

import json
from types import SimpleNamespace

import pytest
from runs.written_runs import record, write_run

from record_sweep import figures, gpu_seconds, main, settled_step
from results import read_records


def _at(step, nnz):
    return {"step": step, "sparsity": {"nnz_mean": [nnz - 1, nnz + 1]}}


def test_a_target_is_settled_from_where_the_mean_of_20_steps_stays_near_it():
    falling = [_at(step, max(30.0, 600.0 / step)) for step in range(2, 102, 2)]
    settled = settled_step(falling, 30.0)
    assert 20 < settled < 40  # at 30 from step 20 on, and the window forgets what was before
    noisy = [_at(step, 30.0 + (8.0 if step % 4 else -8.0)) for step in range(2, 102, 2)]
    assert settled_step(noisy, 30.0) < 20
    leaves = [*falling, *(_at(step, 40.0) for step in range(102, 122, 2))]
    assert settled_step(leaves, 30.0) is None
    returns = [*leaves, *(_at(step, 30.0) for step in range(122, 162, 2))]
    assert settled_step(returns, 30.0) > 120


def test_steps_that_a_process_made_after_its_last_record_are_counted():
    train = [(5, 10.0), (10, 20.0), (20, 12.0), (30, 32.0)]  # the second process begins at step 14
    run = SimpleNamespace(
        train=[{"step": step, "train_seconds": seconds} for step, seconds in train],
        sessions=[{"step": 0, "ranks": 2}, {"step": 14, "ranks": 1}],
    )
    assert gpu_seconds(run) == ([5, 10, 20, 30], [20.0, 40.0, 60.0, 80.0])


def test_a_run_whose_last_step_was_skipped_ended_with_that_step(tiny, tmp_path):
    recipe = tiny("name=a-seed0", f"logging.run_dir={tmp_path}")
    began = {"step": 0, "tokens": 0, "ranks": 1, "device": "cpu", "cores": 2}
    began |= {"kind": "session", "id": "a", "started": "2026-01-02T03:04", "commit": "abc"}
    ended = {"kind": "session_end", "step": 4, "tokens": 1024, "session": "a", "how": "finished"}
    write_run(recipe, [began, *(record(recipe, step) for step in (1, 2, 3)), ended])
    runs = [{"name": "a-seed0", "group": "a", "seed": 0}]
    (tmp_path / "sweep.json").write_text(json.dumps({"name": "x", "description": "", "runs": runs}))
    [measurements] = figures(tmp_path)
    assert {(m.case["step"], m.case["tokens"]) for m in measurements} == {(4, 1024)}


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        (["optimizer.gate_learning_rate=1e-4"], {"gate_learning_rate": 1e-4}),
        (["optimizer.gate_optimizer=muon"], {}),
        (
            ["optimizer.normalize_neurons=true"],
            {"gate_learning_rate": 5e-4, "normalize_neurons": True},
        ),
    ],
)
def test_a_sweeps_runs_are_recorded_with_where_they_were_trained(
    tiny, tmp_path, capsys, settings, recorded
):
    folder, results = tmp_path / "sweep", tmp_path / "results.jsonl"
    overrides = ["sparsity.target_nnz=3", "optimizer.name=muon", "optimizer.learning_rate=4e-3"]
    recipe = tiny("name=target-seed0", *overrides, *settings, f"logging.run_dir={folder}")
    held_out = {"kind": "validation", "tokens": 512, "num_targets": 8}
    validations = [held_out | {"step": step, "loss": 5.0 - step} for step in (2, 4)]
    task = {"acc": 0.25, "acc_stderr": 0.1, "rows": 8, "of": 8, "in_mean": True}
    scores = {"kind": "evaluation", "step": 4, "tokens": 1024, "mean": 0.25, "mean_stderr": 0.1}
    trained = [record(recipe, step) for step in (1, 2, 3, 4)]
    for line, seconds in zip(trained, (2.0, 3.0, 3.5, 3.75), strict=True):
        line["train_seconds"] = seconds  # by two processes, of one rank and of two
    lines = [*trained, *validations, scores | {"tasks": {"piqa": task}}]
    session = {"kind": "session", "step": 0, "tokens": 0, "id": "a", "started": "2026-01-02T03:04"}
    session |= {"ranks": 2, "device": "NVIDIA H200", "host": "elsewhere", "commit": "abc"}
    session |= {"started_at": 0.0, "startup_seconds": 1.0, "pid": 1, "versions": {}, "cores": 32}
    write_run(recipe, [session | {"id": "b", "ranks": 1}, session | {"step": 2}, *lines])
    runs = [{"name": "target-seed0", "group": "target", "seed": 0}]
    content = {"name": "x", "description": "", "command": "sparsellm sweep x", "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(content))
    main([str(folder), "--record", str(results)])
    assert "sweep_x run=target-seed0 " in capsys.readouterr().out
    rows = read_records(results)
    assert {(r["bench"], r["hardware"], r["commit"], r["date"], r["command"]) for r in rows} == {
        ("sweep_x", "2× NVIDIA H200, 32 cores", "abc", "2026-01-02", "sparsellm sweep x")
    }
    assert {r["case"]["run"] for r in rows} == {"target-seed0"}
    by_metric = {(r["metric"], r["case"]["step"]): r["value"] for r in rows}
    assert by_metric["validation_loss", 2] == 3.0
    assert by_metric["validation_loss", 4] == 1.0
    assert by_metric["gpu_seconds", 2] == 3.0
    assert by_metric["gpu_seconds", 4] == 3.0 + 2 * 3.75
    assert rows[0]["case"]["learning_rate"] == recipe.optimizer.learning_rate
    assert rows[0]["case"]["optimizer"] == "muon"
    keys = ("gate_learning_rate", "normalize_neurons")
    assert {key: rows[0]["case"][key] for key in keys if key in rows[0]["case"]} == recorded
    assert rows[0]["case"]["precision"] == recipe.runtime.precision
    nnz = by_metric["nnz", 4]
    assert by_metric["target_error", 4] == pytest.approx(nnz / 3 - 1)
    assert (by_metric["score_mean", 4], by_metric["acc", 4]) == (0.25, 0.25)
    [piqa] = [r for r in rows if r["metric"] == "acc"]
    assert piqa["case"]["task"] == "piqa"
    for curves, steps in ((["target-*"], [2, 4]), ([], [4]), (["dense-*"], [4])):
        results.unlink()
        main([str(folder), "--record", str(results), "--curves", *curves])
        for metric in ("validation_loss", "gpu_seconds"):
            recorded = [r["case"]["step"] for r in read_records(results) if r["metric"] == metric]
            assert recorded == steps
