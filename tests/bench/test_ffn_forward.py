"""`sparsellm bench ffn` on a CPU, with a clock of our own; the GPU run is the benchmark itself."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from sparsellm import cli
from sparsellm.analyze.trace import load_traces
from sparsellm.bench import ffn_cases, ffn_forward, ffn_records, ffn_sweep, timing
from sparsellm.bench.ffn_cases import SAMPLE_COMMANDS, SHAPES, Case, grid, parse_nnz, parse_shape
from sparsellm.bench.timing import Ceilings
from sparsellm.ffn.accelerate import Acceleration
from sparsellm.ffn.module import SparseFFN

from .conftest import CPU, GATED, NON_GATED

TIMES = {"dense_eager": 3.0, "dense_compiled": 2.0, "union": 1.0, "twell": 1.25}


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Every call of a side takes what TIMES says; the calls in a row, by side, are kept."""
    monkeypatch.chdir(tmp_path)  # away from the checkout's own traces, which are wider
    rows = []

    def interleaved(sides, seconds):
        assert seconds == 0.5
        rows.append({name: row.calls for name, (row,) in sides.items()})
        return {name: TIMES[name] * len(row.calls) for name, (row,) in sides.items()}

    def in_a_row(calls):
        def run():
            for call in calls:
                call()

        run.calls = calls
        run()
        return run

    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing, "in_a_row", in_a_row)
    monkeypatch.setattr(timing, "graph", in_a_row)
    monkeypatch.setattr(timing, "ceilings", lambda device: Ceilings(700.0, 4000.0))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return rows


def _run(cases, **options):
    defaults = {"traces": None, "kernels": "sparse", "formats": ["union"], "seconds": 0.5}
    options = defaults | {"with_energy": False} | options
    return list(ffn_forward.run(cases, CPU, **options))


def test_the_grid_has_every_case_once_and_compiled_functions_in_a_row():
    cases = grid(ffn_cases.TOKENS, SHAPES, ["trace", "uniform", "skewed"], ffn_cases.NNZ)
    assert len(cases) == len(set(cases)) == 6 * (1 + 4 * 2 * 6)
    assert Case(16_384, SHAPES[1], "skewed", 4096) in cases  # 50%
    assert {case.shape for case in cases if case.pattern == "trace"} == {SHAPES[0]}
    groups = [(case.tokens, case.shape) for case in cases]
    changes = sum(a != b for a, b in itertools.pairwise(groups))
    assert changes == len(set(groups)) - 1
    assert grid([8], [SHAPES[1]], ["trace"], []) == []


def test_shapes_and_non_zeros_are_read():
    assert parse_shape("2048/5632") == SHAPES[0]
    assert parse_shape("2048/8192/non-gated") == SHAPES[1]
    assert [parse_shape(str(shape)) for shape in SHAPES] == list(SHAPES)
    assert (parse_nnz("30", 5632), parse_nnz("50%", 5632)) == (30, 2816)
    for text in ("2048", "a/b", "2048/5632/dense", "2048/5630"):
        with pytest.raises(ValueError, match=f"--shape {text}"):
            parse_shape(text)
    for text in ("many", "x%", "0", "95%"):
        with pytest.raises(ValueError, match=f"--nnz {text}"):
            parse_nnz(text, 5632)
    with pytest.raises(ValueError, match="--M 0"):
        grid([0, 8], SHAPES, ["uniform"], ["30"])


@pytest.mark.parametrize("shape", [GATED, NON_GATED])
def test_forward_records(clock, shape):
    ceilings, found = _run([Case(128, shape, "skewed", 20)])
    assert [(m.bench, m.metric, m.value) for m in ceilings] == [
        ("ceilings", "tflops", 700.0),
        ("ceilings", "gbytes_per_s", 4000.0),
    ]
    case = found[0].case
    assert all(m.bench == "ffn_forward" and m.case == case for m in found)
    assert 20 < case["union_64"] < 256
    assert case["measured_nnz"] == pytest.approx(20, rel=0.02)
    del case["union_64"], case["measured_nnz"]
    expected = {"M": 128, "K": 64, "N": 256, "gated": shape.gated, "pattern": "skewed"}
    assert case == expected | {"nnz": 20, "kernels": "sparse", "path": "sparse"}
    by_metric = {m.metric: m for m in found}
    ms, eager = by_metric["ms"], by_metric["ms_dense_eager"]
    assert (ms.value, ms.unit, ms.baseline, ms.ratio) == (1.0, "ms", 2.0, 2.0)
    assert (eager.value, eager.baseline, eager.ratio) == (3.0, 2.0, 2 / 3)
    others = 2 if shape.gated else 1
    dense = 2 * 128 * 64 * 256 * (1 + others) / 2e-3 / 1e12  # in 2 ms
    needed = 2 * 128 * 64 * (256 + others * 20) / 1e-3 / 1e12  # in 1 ms
    assert by_metric["tflops_dense"].value == pytest.approx(dense)
    assert by_metric["tflops"].value == pytest.approx(needed, rel=0.01)
    assert by_metric["tflops"].ratio == pytest.approx(needed / 700, rel=0.01)
    assert 0 <= by_metric["difference"].value < 0.01


def test_decode_is_timed_both_ways_and_rotates_its_weights(clock, monkeypatch):
    monkeypatch.setattr(timing, "copies_beyond_cache", lambda num_bytes, device: 3)
    _, eager, graph = _run([Case(8, GATED, "uniform", 15)])
    assert {m.case["launch"] for m in eager} == {"eager"}
    assert {m.case["launch"] for m in graph} == {"graph"}
    assert len(clock) == 2
    for calls in (calls for sides in clock for calls in sides.values()):
        assert len(calls) == 12
        assert len({id(call) for call in calls}) == 3
        assert all(a is not b for a, b in itertools.pairwise(calls))
    for found in (eager, graph):
        by_metric = {m.metric: m for m in found}
        assert all(m.bench == "ffn_decode" for m in found)
        assert (by_metric["ms"].value, by_metric["ms"].ratio) == (1.0, 2.0)
        union = found[0].case["union_64"]
        needed = 2 * 64 * (256 + 2 * union) / 1e-3 / 1e9
        assert by_metric["gbytes_per_s"].value == pytest.approx(needed)
        assert by_metric["gbytes_per_s_dense"].baseline == 4000.0


def test_a_trace_gives_a_record_a_layer_and_their_mean(clock, traces):
    _, first, second, mean = _run([Case(400, GATED, "trace", None)], traces=traces)
    assert [found[0].case["layer"] for found in (first, second, mean)] == [0, 1, "mean"]
    nnz = [found[0].case["nnz"] for found in (first, second)]
    assert nnz == pytest.approx([0.02 * 256, 0.06 * 256], rel=0.1)
    assert mean[0].case["nnz"] == pytest.approx(sum(nnz) / 2, abs=0.051)
    assert [m.metric for m in mean] == [m.metric for m in first]
    assert [m.ratio for m in mean][:2] == [2.0, 2 / 3]
    rates = [next(m for m in found if m.metric == "tflops") for found in (first, second, mean)]
    assert rates[2].value == pytest.approx((rates[0].value + rates[1].value) / 2)
    assert rates[2].ratio == pytest.approx(rates[2].value / 700)
    assert "layer mean" in ffn_records.rows(mean)[0]
    decode = _run([Case(8, GATED, "trace", None)], traces=traces)[-1]
    eager, graph = ffn_records.rows(decode)
    assert " eager (sparse) " in eager
    assert " graph (sparse) " in graph


def test_formats_are_timed_together_and_recorded_apart(clock, traces):
    formats = ["union", "twell"]
    _, union, twell = _run([Case(128, GATED, "uniform", 20)], formats=formats)
    assert list(clock[0]) == ["dense_eager", "dense_compiled", *formats]
    assert "format" not in union[0].case  # records from before there were two
    assert twell[0].case == union[0].case | {"format": "twell"}
    assert (union[0].value, twell[0].value, twell[0].ratio) == (1.0, 1.25, 1.6)
    assert " (sparse twell) " in ffn_records.rows(twell)[0]
    means = _run([Case(400, GATED, "trace", None)], traces=traces, formats=formats)[-1]
    by_format = {m.case.get("format"): m.value for m in means if m.metric == "ms"}
    assert by_format == {None: 1.0, "twell": 1.25}


def test_token_order_is_measured_beside_the_natural_one(clock, monkeypatch, traces, ids):
    monkeypatch.setattr(ffn_sweep, "sort_ms", lambda ids_BT, vocabulary, seconds: 0.5)
    _, *found, means = _run([Case(200, GATED, "trace", None)], traces=traces, ids=ids)
    keys = [(each[0].case["layer"], each[0].case.get("token_order")) for each in found]
    assert keys == [(0, None), (0, "auto"), (1, None), (1, "auto")]
    assert [each[0].value for each in found] == [1.0, 1.25] * 2  # half of the sort a layer
    for natural, ordered in (found[:2], found[2:]):
        assert ordered[0].case["union_64"] != natural[0].case["union_64"]
    by_order = {m.case.get("token_order"): m.value for m in means if m.metric == "ms"}
    assert by_order == {None: 1.0, "auto": 1.25}
    assert "layer mean in token order" in ffn_records.rows(means)[1]
    # Decoding has none, and repetitions would be sorted side by side.
    for m in (8, 400):
        assert all(
            "token_order" not in each[0].case
            for each in _run([Case(m, GATED, "trace", None)], traces=traces, ids=ids)
        )


def test_fewer_tokens_than_recorded_fire_as_recorded(traces):
    inputs = ffn_cases.trace_inputs(Case(50, GATED, "trace", None), traces, 1, CPU)
    fired = (inputs.x_MK.float() @ inputs.w_NK.float().t() > 0).sum(1)
    count = load_traces(traces, 256)[1].count_M.astype(int)
    assert fired.tolist() in [count[start : start + 50].tolist() for start in (0, 50, 100, 150)]
    assert inputs.nnz == fired.float().mean()


def test_energy_is_of_few_cases(clock, monkeypatch, traces):
    class Counter:
        def __init__(self, device):
            self.read = None

    def per_call(sides, ms, read, synchronize):
        for call in sides.values():
            call()
        assert ms == {"dense_compiled": 2.0 * layers, "ours": 1.0 * layers}
        return {"dense_compiled": 300.0 * layers, "ours": 200.0 * layers}

    monkeypatch.setattr(ffn_sweep.energy, "EnergyCounter", Counter)
    monkeypatch.setattr(ffn_sweep.energy, "per_call", per_call)
    monkeypatch.setattr(ffn_sweep, "ENERGY_TOKENS", 100)
    layers = 1
    cases = [Case(100, GATED, "uniform", 30), Case(100, GATED, "uniform", 15)]
    found = _run(cases, with_energy=True)
    assert [found_[0].metric for found_ in found] == ["tflops", "ms", "mJ_per_token", "ms"]
    energy = found[2][0]
    assert (energy.value, energy.unit, energy.baseline, energy.ratio) == (2.0, "mJ", 3.0, 1.5)
    assert energy.case == found[1][0].case
    assert "2.0000 mJ per token, dense 3.0000: 1.50×" in ffn_records.rows(found[2])[0]
    layers = 2
    energy = _run([Case(100, GATED, "trace", None)], with_energy=True, traces=traces)[-1][0]
    assert (energy.case["layer"], energy.value, energy.baseline) == ("mean", 2.0, 3.0)


def test_without_other_traces_those_of_the_checkout_are_measured(clock, traces, monkeypatch):
    monkeypatch.setattr(ffn_sweep, "SAMPLE_TRACES", traces)
    found = _run([Case(100, GATED, "trace", None)])
    *layers, means = (records for records in found if "layer" in records[0].case)
    assert [found[0].case["layer"] for found in layers] == [0, 1]
    assert {found[0].case["traces"] for found in (*layers, means)} == {"sample"}
    named = _run([Case(100, GATED, "trace", None)], traces=traces.rename(traces.parent / "a.npz"))
    assert "traces" not in named[-1][0].case


def test_what_is_skipped_says_why(clock, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cases = [Case(128, GATED, name, nnz) for name, nnz in [("trace", None), ("uniform", 20)]]
    _, skipped, found = _run(cases)
    why = "benchmarks/traces/sample/traces.npz does not exist; give --traces FILE, or make it: "
    assert (skipped.case, skipped.why) == (cases[0], why + SAMPLE_COMMANDS)
    assert found[0].metric == "ms"

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(ffn_sweep, "synthetic_inputs", full)
    assert _run(cases)[2] == ffn_sweep.Skipped(cases[1], "out of memory")


def test_a_wrong_result_has_no_time(clock, monkeypatch):
    forward = SparseFFN.forward
    monkeypatch.setattr(SparseFFN, "forward", lambda self, x: forward(self, x) * 1.1)
    monkeypatch.setattr(ffn_forward.sparsellm, "accelerate", lambda *_, **__: Acceleration())
    _, skipped = _run([Case(128, GATED, "uniform", 20)])
    assert skipped.why == "ours (union) differs from dense by 10.0%; wrong results are not timed"


def test_the_sides_alternate_over_the_copies():
    order = []
    sides = {
        name: [lambda i=i, name=name: order.append(name + str(i)) for i in range(2)]
        for name in "abc"
    }

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        assert timing.interleaved(sides, 1e-9) == {"a": 1.0, "b": 1.0, "c": 1.0}
        assert order[:6] == ["a0", "b1", "c0", "a1", "b0", "c1"]
        assert len(order) == 3 * timing.MIN_ROUNDS
        order.clear()
        timing.interleaved(sides, 1e3)
        assert len(order) == 3 * timing.MAX_ROUNDS
        order.clear()
        timing.interleaved(sides, 1e-9, lambda: order.append("lead"))
        assert order[:6] == ["lead", "a0", "lead", "b1", "lead", "c0"]


def test_the_command_records_case_by_case(clock, monkeypatch, tmp_path, capsys):
    run = ffn_forward.run
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        ffn_forward, "run", lambda cases, device, **options: run(cases, CPU, **options)
    )
    monkeypatch.setattr("sparsellm.bench.record.hardware", lambda: "none")
    path = tmp_path / "results.jsonl"
    command = ["bench", "ffn", "--shape", "64/256", "--M", "128", "--nnz", "20", "--seconds", "0.5"]
    command += ["--kernels", "sparse", "--record", str(path)]
    assert cli.main([*command, "--pattern", "uniform", "skewed"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["bench"] for line in lines] == ["ceilings"] * 2 + ["ffn_forward"] * 10
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "ceiling: 700 TFLOP/s (bf16 matmul, 8192³)"
    assert printed[2].startswith("M 128 64/256 uniform nnz 20 union ")
    assert "1.0000 ms, dense 2.0000 (eager 3.0000): 2.00×" in printed[3]
    monkeypatch.setattr(ffn_forward, "MAX_DIFFERENCE", -1.0)
    assert cli.main([*command, "--pattern", "uniform"]) == 1
    captured = capsys.readouterr()
    assert "skipped: M 128 64/256 uniform nnz 20: ours (union) differs" in captured.out
    assert captured.err == "error: no case was measured; the reasons are above\n"


def test_the_commands_errors(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in [
        ([], "needs a CUDA device"),
        (["--all"], "needs a CUDA device"),
        (["--shape", "2048"], "--shape 2048: give K/N"),
        (["--shape", "4096/14336", "--pattern", "trace"], "traces are of 2048/5632"),
        (["--nnz", "6000"], "--nnz 6000: not between 1 and 90% of 5632"),
    ]:
        assert cli.main(["bench", "ffn", *arguments]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "ffn", "--pattern", "random"])


def test_a_trace_file_that_is_not_there_is_an_error(clock, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such trace file"):
        _run([], traces=tmp_path / "absent.npz")
