"""`sparsellm bench ffn-train` on a CPU, with a clock of our own; memory is a GPU's alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from listing import listing
from sparsellm import cli
from sparsellm.bench import ffn_cases, ffn_records, ffn_sweep, ffn_train, memory, timing
from sparsellm.bench.ffn_cases import Case
from sparsellm.bench.ffn_records import StepTimes
from sparsellm.bench.memory import StepMemory
from sparsellm.ffn.capacity import size_for
from sparsellm.ffn.kernels.gpu_architecture import FORCED
from sparsellm.ffn.module import SparseFFN

from .conftest import CPU, GATED, NON_GATED

CASE = Case(128, GATED, "uniform", 20)


def _run(cases, **options):
    options = {"traces": None, "seconds": 0.5, "with_energy": False} | options
    return list(ffn_train.run(cases, CPU, **options))


@pytest.mark.parametrize("shape", [GATED, NON_GATED])
def test_records(train_clock, shape):
    (found,) = _run([Case(128, shape, "skewed", 20)])
    case = dict(found[0].case)
    assert all(m.bench == "ffn_train" and m.case == case for m in found)
    assert 20 < case.pop("union_64") < 256
    assert case.pop("measured_nnz") == pytest.approx(20, rel=0.02)
    expected = {"M": 128, "K": 64, "N": 256, "gated": shape.gated, "pattern": "skewed"}
    assert case == expected | {"nnz": 20, "path": "sparse"}
    assert [(m.metric, m.value, m.unit, m.baseline, m.ratio) for m in found[:2]] == [
        ("ms", 4.0, "ms", 6.0, 1.5),
        ("forward_ms", 1.0, "ms", 3.0, 3.0),
    ]
    assert [m.metric for m in found[2:]] == ["difference"]
    assert 0 < found[2].value < 0.01


def test_both_sides_give_the_gradients_of_x_and_all_weights(train_clock):
    inputs = ffn_cases.synthetic_inputs(CASE, CPU)
    bench = ffn_train.FFNTrainBench(CPU, 0.5)
    steps, difference = bench.checked_steps(CASE, inputs)
    assert difference < 0.01
    shapes = [(128, 64), (256, 64), (256, 64), (64, 256)]
    assert all([tuple(g.shape) for g in step()] == shapes for step in steps.values())
    assert [len(step.forward()) for step in steps.values()] == [1, 2]  # dense has no L1
    # Without L1 the two agree.
    ours, dense = steps["ours"], steps["dense_compiled"]
    plain = torch.autograd.grad(ours.forward()[0], ours.inputs, ours.d_outputs[0])
    for a, b in zip(plain, dense(), strict=True):
        assert ffn_train.relative_difference(a, b) < 0.01
    assert not inputs.x_MK.requires_grad


def test_ours_has_the_room_that_training_settles_on(train_clock, monkeypatch):
    compute, capacities = SparseFFN.compute, []

    def spy(self, x, capacity, order=None):
        capacities.append(capacity)
        return compute(self, x, capacity, order)

    monkeypatch.setattr(SparseFFN, "compute", spy)
    case = Case(1024, GATED, "uniform", 2)
    (found,) = _run([case])
    columns = found[0].case["union_64"] * 16
    room = size_for(1.25 * columns)
    assert room < 16 * 256
    assert capacities[:3] == [0, room, None]  # to count, ours, dense to compare with
    assert set(capacities[3:]) == {room}


def test_a_trace_gives_a_record_a_layer_and_their_mean(train_clock, traces):
    first, second, mean = _run([Case(400, GATED, "trace", None)], traces=traces)
    assert [found[0].case["layer"] for found in (first, second, mean)] == [0, 1, "mean"]
    assert [m.metric for m in mean] == [m.metric for m in first]
    assert [m.ratio for m in mean[:2]] == [1.5, 3.0]
    assert mean[2].value == pytest.approx((first[2].value + second[2].value) / 2)
    assert "layer mean" in ffn_records.rows(mean)[0]


def test_means_of_memory_are_ratios_of_means():
    layers = []
    for layer, held in enumerate((100.0, 300.0)):
        case = {"layer": layer, "nnz": 1.0, "measured_nnz": 1.0, "union_64": 1.0, "path": "sparse"}
        both = {"ours": StepMemory(held, 400), "dense_compiled": StepMemory(600, 800)}
        times = {"ours": StepTimes(1.0, 2.0), "dense_compiled": StepTimes(2.0, 4.0)}
        layers += ffn_records.train_records(case, times, both, 0.0)
    means = {m.metric: m for m in ffn_records.mean_over_layers(layers)}
    held, peak = means["memory_MiB"], means["peak_MiB"]
    assert (held.value, held.unit, held.baseline, held.ratio) == (200, "MiB", 600, 3.0)
    assert (peak.value, peak.baseline, peak.ratio) == (400, 800, 2.0)


def test_memory_counts_what_is_kept_and_the_peak(monkeypatch):
    mib = 2**20
    allocated, events = iter([10 * mib, 20 * mib]), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 45 * mib)

    def forward():
        events.append("forward")
        return (torch.empty(mib), torch.empty(mib, dtype=torch.int8))  # 4 MiB and 1

    found = memory.of_step(forward, lambda outputs: events.append(len(outputs)))
    assert found == StepMemory(held=5.0, peak=35.0)
    assert events == ["reset", "forward", 2]


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("the gradient of x", lambda y, l1: (1.1 * y - 0.1 * y.detach(), l1)),
        ("the gradient of x", lambda y, l1: (y, 2 * l1 - l1.detach())),
        ("the L1 sum", lambda y, l1: (y, 1.1 * l1)),
        ("y", lambda y, l1: (1.1 * y, l1)),
    ],
)
def test_a_wrong_gradient_has_no_time(train_clock, monkeypatch, what, wrong):
    compute = SparseFFN.compute

    def off(self, x, capacity, order=None):
        y, stats = compute(self, x, capacity, order)
        if capacity:
            y, l1_sum = wrong(y, stats.l1_sum)
            stats = stats._replace(l1_sum=l1_sum)
        return y, stats

    monkeypatch.setattr(SparseFFN, "compute", off)
    (skipped,) = _run([CASE])
    assert skipped.why.startswith(f"{what} differs from dense")
    assert skipped.why.endswith("%; wrong results are not timed")


def test_energy_is_of_forward_and_backward(train_clock, monkeypatch, traces):
    class Counter:
        def __init__(self, device):
            self.read = None

    def per_call(sides, ms, read, synchronize):
        assert [type(call()) for call in sides.values()] == [type(None)] * 2
        assert ms == {"dense_compiled": 12.0, "ours": 8.0}  # of two layers
        return {"dense_compiled": 800.0, "ours": 400.0}

    monkeypatch.setattr(ffn_sweep.energy, "EnergyCounter", Counter)
    monkeypatch.setattr(ffn_sweep.energy, "per_call", per_call)
    monkeypatch.setattr(ffn_sweep, "ENERGY_TOKENS", 100)
    energy = _run([Case(100, GATED, "trace", None)], with_energy=True, traces=traces)[-1][0]
    assert (energy.bench, energy.case["layer"], energy.metric) == (
        "ffn_train",
        "mean",
        "mJ_per_token",
    )
    assert (energy.value, energy.baseline, energy.ratio) == (2.0, 4.0, 2.0)
    assert "2.0000 mJ per token, dense 4.0000: 2.00×" in ffn_records.rows([energy])[0]


def test_the_command_records_case_by_case(train_clock, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sparsellm.bench.output.gpu", lambda bench: CPU)
    monkeypatch.setattr("sparsellm.bench.record.hardware", lambda: "H")
    path = tmp_path / "results.jsonl"
    command = ["bench", "ffn-train", "--shape", "64/256", "--M", "128", "--nnz", "20"]
    command += ["--seconds", "0.5", "--pattern", "uniform", "skewed", "--record", str(path)]
    assert cli.main(command) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["bench"] for line in lines] == ["ffn_train"] * 6
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("M 128 64/256 uniform nnz 20 union ")
    assert "4.0000 ms, dense 6.0000: 1.50×, forward 1 ms 3.00×" in printed[0]
    assert "| 4 (1.50× of 6) | 1 (3.00× of 3) |" in listing(lines)
    assert not any("arch" in line["case"] for line in lines)
    monkeypatch.setenv(FORCED, "")  # what the command sets ends with the test
    assert cli.main([*command, "--arch", "portable"]) == 0
    *_, last = path.read_text().splitlines()
    assert json.loads(last)["case"]["arch"] == "portable"
    monkeypatch.delenv(FORCED)
    capsys.readouterr()
    monkeypatch.setattr(ffn_train, "MAX_DIFFERENCE", -1.0)
    assert cli.main(command) == 1
    assert "skipped: M 128 64/256 uniform nnz 20: y differs" in capsys.readouterr().out


def test_the_commands_errors(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in [
        ([], "bench ffn-train measures GPU kernels and needs a CUDA device"),
        (["--all"], "needs a CUDA device"),
        (["--shape", "4096/14336", "--pattern", "trace"], "traces are of 2048/5632"),
    ]:
        assert cli.main(["bench", "ffn-train", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert ffn_train.TRAIN_TOKENS == (2048, 16_384, 65_536)


def test_token_order_is_measured_beside_the_natural_one_and_charged(monkeypatch, traces, ids):
    def interleaved(stages, seconds, lead):
        for (call,) in stages.values():
            call()
        ms = {"forward": 1.0, "backward": 3.0, "sort": 0.5}
        more = {"ordered forward": 0.25, "ordered backward": 0.125}
        return {name: ms[name.split()[-1]] + more.get(name, 0.0) for name in stages}

    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing, "other_work", lambda device: "lead")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    *found, means = _run([Case(200, GATED, "trace", None)], traces=traces, ids=ids)
    keys = [(each[0].case["layer"], each[0].case.get("token_order")) for each in found]
    assert keys == [(0, None), (0, "auto"), (1, None), (1, "auto")]
    for natural, ordered in (found[:2], found[2:]):
        assert ordered[0].case["union_64"] != natural[0].case["union_64"]
        assert natural[0].value == 4.0
        # The norm's extra, and half of the sort: there are two layers.
        assert ordered[0].value == 4.0 + 0.25 + 0.125 + 0.5 / 2
        assert ordered[1].value == 1.0 + 0.25 + 0.5 / 2  # forward
        assert ordered[0].baseline == natural[0].baseline == 4.0
    assert "layer mean in token order" in ffn_records.rows(means)[1]


def test_ids_of_another_trace_are_refused(train_clock, traces, tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((3, 50), int))
    (skipped,) = _run([Case(200, GATED, "trace", None)], traces=traces, ids=tmp_path / "ids.npy")
    assert "150 ids do not belong to a trace of 200 tokens" in skipped.why


def test_formats_are_recorded_apart(train_clock):
    case = Case(128, GATED, "uniform", 20)
    union, twell = _run([case], formats=["union", "twell"])
    assert "format" not in union[0].case  # records from before there were two
    assert twell[0].case == union[0].case | {"format": "twell"}
    assert [m.metric for m in twell] == [m.metric for m in union]
    assert " (sparse twell) " in ffn_records.rows(twell)[0]
