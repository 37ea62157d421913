"""`sparsellm bench dispatch` on a CPU: given times and costs, what is said of them."""

from __future__ import annotations

import json

import pytest
import torch

from sparsellm import cli
from sparsellm.bench import dispatch_sweep, timing
from sparsellm.bench.dispatch_sweep import crossover, switch_union
from sparsellm.bench.listing import listing
from sparsellm.ffn.dispatch import Costs

from .conftest import CPU, GATED

COSTS = Costs(dense=2.0, fixed=0.5, per_neuron=0.01)  # leaves at a union of 144, returns at 134


@pytest.fixture
def measured_costs(train_clock, monkeypatch):
    """COSTS; and sparse takes 1, 2, 3, … ms, dense 2.5."""
    asked, calls = [], []

    def measure_costs(*arguments):
        asked.append(arguments)
        return COSTS

    def interleaved(sides, seconds, lead):
        calls.append(sides)
        ms = {"dense_compiled forward": 1.0, "dense_compiled backward": 1.5}
        return ms | {"ours forward": 0.5, "ours backward": len(calls) - 0.5}

    monkeypatch.setattr("sparsellm.ffn.kernels.training_costs.measure_costs", measure_costs)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    return asked


def _run(**options):
    options = {"patterns": ["skewed"], "nnz": ["4", "16", "64"], "seconds": 0.5} | options
    return list(dispatch_sweep.run(GATED, 128, CPU, **options))


def test_records(measured_costs):
    switch, *points, crossing = _run()
    assert measured_costs == [(128, 64, 256, True, True, -1)]
    key = {"M": 128, "K": 64, "N": 256, "gated": True}
    assert [(m.metric, m.value, m.case) for m in switch] == [
        ("leave_union", pytest.approx(144), key),
        ("return_union", pytest.approx(134), key),
    ]
    unions = [found[0].case["union_64"] for found in points]
    assert unions == sorted(unions)
    for number, (found, nnz) in enumerate(zip(points, (4, 16, 64), strict=True)):
        ms, predicted = found
        assert {"M", "K", "N", "gated", "pattern", "nnz", "measured_nnz", "union_64"} == set(
            ms.case
        )
        assert (ms.bench, ms.case["nnz"], ms.case["pattern"]) == ("dispatch", nnz, "skewed")
        assert (ms.metric, ms.value, ms.baseline) == ("ms", number + 1.0, 2.5)
        assert ms.ratio == 2.5 / (number + 1)
        assert predicted.metric == "predicted_ms"
        assert predicted.value == pytest.approx(COSTS.sparse(unions[number]), abs=1e-3)
        assert predicted.baseline == 2.0
    (m,) = crossing
    assert (m.metric, m.case) == ("crossover_union", key | {"pattern": "skewed"})
    assert m.value == pytest.approx((unions[1] + unions[2]) / 2)


def test_a_wrong_point_is_skipped_and_no_crossover_is_made_up(measured_costs, monkeypatch):
    monkeypatch.setattr(dispatch_sweep.FFNTrainBench, "checked_steps", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _run()

    def refused(*_):
        raise ValueError("y differs from dense by 9%")

    monkeypatch.setattr(dispatch_sweep.FFNTrainBench, "checked_steps", refused)
    _, *skipped = _run()
    assert [one.why for one in skipped] == ["y differs from dense by 9%"] * 3


def test_where_the_rule_switches():
    assert switch_union(COSTS, 0.97, 256) == pytest.approx(144)
    assert switch_union(COSTS, 0.97, 100) == 100  # always sparse
    assert switch_union(Costs(1.0, 2.0, 0.01), 0.97, 256) == 0  # never
    assert switch_union(Costs(1.0, 0.5, 0.0), 0.97, 256) == 256


def test_where_measured_times_cross():
    assert crossover([(100, 0.5), (200, 0.9), (300, 1.1), (400, 1.5)]) == pytest.approx(250)
    assert crossover([(100, 0.5), (200, 0.9)]) is None
    assert crossover([(100, 1.5), (200, 1.9)]) is None
    assert crossover([]) is None


def test_a_sweep_stays_within_the_neurons():
    assert dispatch_sweep.sweep(64) == ["8", "12", "16", "24", "50%"]
    assert dispatch_sweep.sweep(5632)[-2:] == ["512", "50%"]


def test_costs_that_cannot_be_measured_are_one_line(train_clock, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried much")

    monkeypatch.setattr("sparsellm.ffn.kernels.training_costs.measure_costs", full)
    with pytest.raises(ValueError, match=r"the costs of M 128 64/256 cannot .*out of memory\.$"):
        _run()


def test_the_command_prints_a_table_and_records(measured_costs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sparsellm.bench.output.gpu", lambda bench: CPU)
    monkeypatch.setattr("sparsellm.bench.record.hardware", lambda: "H")
    path = tmp_path / "results.jsonl"
    command = ["bench", "dispatch", "--shape", "64/256", "--M", "128", "--nnz", "2", "16", "64"]
    assert cli.main([*command, "--pattern", "skewed", "--record", str(path)]) == 0
    title, heading, first, _, last, end = capsys.readouterr().out.splitlines()
    assert title == (
        "M 128 64/256: auto leaves the sparse path above a union of 144 neurons and returns to it "
        "below 134"
    )
    assert len(first) == len(heading) + 2  # "sparse" under "auto"
    assert first.split()[:2] == ["skewed", "2"]
    assert first.endswith("  sparse")
    assert last.endswith("  dense")
    assert end.startswith("skewed: equal times at a union of ")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["bench"] for line in lines} == {"dispatch"}
    found = listing(lines)
    assert "| leave_union | return_union | ms | predicted_ms | crossover_union |" in found
    assert "| 1 (2.50× of 2.5) |" in found


def test_a_recipe_gives_the_shape(measured_costs, monkeypatch, capsys):
    monkeypatch.setattr("sparsellm.bench.output.gpu", lambda bench: CPU)
    seen = []
    monkeypatch.setattr(dispatch_sweep, "run", lambda *arguments, **_: seen.append(arguments) or [])
    assert cli.main(["bench", "dispatch", "--recipe", "0.5b"]) == 1
    assert seen == [((2048, 5632, True), 32_768, CPU)]
    assert "no case was measured" in capsys.readouterr().err
    assert cli.main(["bench", "dispatch", "--recipe", "0.5b", "--M", "64"]) == 1
    assert "omit --shape and --M" in capsys.readouterr().err
