"""`sparsellm bench ffn` and ``ffn-train`` on a CPU; the GPU run is the benchmark itself."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsellm import cli
from sparsellm.analyze.trace import load_traces
from sparsellm.bench import ffn_cases, ffn_forward, ffn_run, ffn_train, timing
from sparsellm.bench.ffn_cases import (
    SAMPLE_COMMANDS,
    Case,
    Layer,
    Shape,
    Traced,
    parse_nnz,
    parse_shape,
)
from sparsellm.bench.patterns import fit_gate
from sparsellm.bench.record import row
from sparsellm.ffn.inference_path.accelerate import Acceleration
from sparsellm.ffn.kernels.compiler.gpu_architecture import FORCED
from sparsellm.ffn.training_path.capacity import size_for
from sparsellm.ffn.training_path.module import SparseFFN

from .conftest import CPU, GATED, SHAPES, options

SMALL = ("--shape", "64/256", "--M", "128", "--nnz", "20", "--seconds", "0.5")
MODULES = {"ffn": ffn_forward, "ffn-train": ffn_train}


def run(name, *words):
    kernels = ["--kernels", "sparse"] if name == "ffn" else []
    return list(MODULES[name].measure(options(name, *SMALL, *kernels, *words), CPU))


# --- cases ----------------------------------------------------------------------------------------


def test_options_select_every_combination():
    parsed = options("ffn", "--M", "8", "2048", "--shape", "2048/5632", "2048/22528")
    cases = ffn_cases.selected(parsed)
    assert len(cases) == len(set(cases)) == 2 * (1 + 2 * 6) + 2 * (2 * 6)
    assert Case(2048, Shape(2048, 22_528, True), "skewed", 11_264) in cases  # 50%
    assert {case.shape for case in cases if case.pattern == "trace"} == {Shape(2048, 5632, True)}


def test_shapes_and_non_zeros_are_read():
    wide = Shape(2048, 8192, False)
    assert parse_shape("2048/8192/non-gated") == wide == parse_shape(str(wide))
    assert (parse_nnz("30", 5632), parse_nnz("50%", 5632)) == (30, 2816)
    for text in ("2048", "a/b", "2048/5632/dense", "2048/5630"):
        with pytest.raises(ValueError, match=f"--shape {text}"):
            parse_shape(text)
    for text in ("many", "x%", "0", "95%"):
        with pytest.raises(ValueError, match=f"--nnz {text}"):
            parse_nnz(text, 5632)


@pytest.mark.parametrize("name", MODULES)
def test_the_commands_errors(name, capsys, monkeypatch):
    monkeypatch.setattr("sparsellm.bench.cli.may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in [
        ([], f"bench {name} measures GPU kernels and needs a CUDA device"),
        (["--shape", "2048"], "--shape 2048: give K/N"),
        (["--shape", "4096/14336", "--pattern", "trace"], "traces are of 2048/5632"),
        (["--nnz", "6000"], "--nnz 6000: not between 1 and 90% of 5632"),
    ]:
        assert cli.main(["bench", name, *arguments]) == 1
        assert message in capsys.readouterr().err
    for wrong in (["--pattern", "random"], ["--M", "0"]):
        with pytest.raises(SystemExit):
            cli.main(["bench", name, *wrong])


# --- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_records(name, shape, clock):
    (measurements,) = run(name, "--shape", shape, "--pattern", "skewed")
    case = dict(measurements[0].case)
    assert {m.bench for m in measurements} == {
        "ffn_train" if name == "ffn-train" else "ffn_forward"
    }
    assert all(m.case == case for m in measurements)
    assert 20 < case.pop("union_64") < 256
    assert case.pop("measured_nnz") == pytest.approx(20, rel=0.02)
    expected = {"M": 128, "K": 64, "N": 256, "gated": shape == "64/256", "pattern": "skewed"}
    expected |= {"nnz": 20, "path": "sparse"} | ({"kernels": "sparse"} if name == "ffn" else {})
    assert case == expected
    by_metric = {m.metric: m for m in measurements}
    stages = 2 if name == "ffn-train" else 1
    ms = by_metric["ms"]
    assert (ms.value, ms.unit, ms.baseline, ms.ratio) == (stages * 1.0, "ms", stages * 2.0, 2.0)
    assert ms.sustained == pytest.approx({
        "p10": stages * 0.9, "p90": stages * 1.1, "watts": 600.0, "sm_mhz": 1500.0, "seconds": 0.5,
    })  # fmt: skip
    assert ms.baseline_sustained["watts"] == 700.0
    mj = by_metric["mJ_per_token"]
    assert (mj.value, mj.baseline) == (stages * 600 / 128, stages * 2 * 700 / 128)
    assert mj.ratio == pytest.approx(2 * 700 / 600)
    assert 0 <= by_metric["difference"].value < 0.01
    assert ("forward_ms" in by_metric) == (name == "ffn-train")


def test_decode_is_a_graph_that_rotates_its_weights(clock, monkeypatch):
    cache = SimpleNamespace(L2_cache_size=256 * 64 * 2)  # as large as the gate's weights
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cache)
    warm, captured = [], []
    monkeypatch.setattr(
        ffn_forward,
        "warm_up",
        lambda configuration, _: warm.append(configuration.stages["forward"]),
    )

    def capture(calls):
        assert warm == [*(call for before in captured for call in before), *calls]
        captured.append(calls)
        return calls[0]

    monkeypatch.setattr(timing, "graph", capture)
    [measurements] = run("ffn", "--M", "8", "--pattern", "uniform")
    assert measurements[0].case["launch"] == "graph"
    assert {m.bench for m in measurements} == {"ffn_decode"}
    assert [len({id(call) for call in calls}) for calls in captured] == [3, 3]  # dense and ours
    assert [
        configuration.calls for configurations in clock for configuration in configurations.values()
    ] == [3, 3]


def test_training_as_graphs_queues_forwards_before_their_backwards(clock, monkeypatch):
    warm, captured = [], []
    monkeypatch.setattr(ffn_train, "warm_up", lambda configuration, _: warm.append(configuration))

    def capture(calls):
        before = len(calls[0].__closure__[0].cell_contents)  # what waits for its backward
        for call in calls:
            call()
        captured.append((before, len(calls)))
        return lambda: None

    monkeypatch.setattr(timing, "graph", capture)
    [measurements] = run("ffn-train", "--graph", "--pattern", "uniform")
    assert captured == [(0, 4), (4, 4)] * 2  # forward and backward of dense, then of ours
    assert len(warm) == 2
    assert measurements[0].case["launch"] == "graph"
    assert [
        (configuration.calls, configuration.most_at_once)
        for configurations in clock
        for configuration in configurations.values()
    ] == [(4, 1), (4, 1)]
    assert {m.metric for m in measurements} >= {"ms", "forward_ms", "backward_ms", "difference"}


@pytest.mark.parametrize("name", MODULES)
def test_formats_are_recorded_apart(name, clock):
    union, twell = run(name, "--pattern", "uniform", "--format", "union", "twell")
    assert "format" not in union[0].case  # records from before there were two
    assert twell[0].case == union[0].case | {"format": "twell"}
    assert [m.metric for m in twell] == [m.metric for m in union]
    assert " format=twell " in row(twell)


@pytest.mark.parametrize("name", MODULES)
def test_a_trace_gives_a_record_a_layer_and_their_mean(name, clock, traces):
    words = ["--pattern", "trace", "--traces", str(traces), "--M", "400"]
    first, second, mean = run(name, *words)
    assert [measurements[0].case["layer"] for measurements in (first, second, mean)] == [
        0,
        1,
        "mean",
    ]
    nnz = [measurements[0].case["nnz"] for measurements in (first, second)]
    assert nnz == pytest.approx([0.02 * 256, 0.06 * 256], rel=0.1)
    assert mean[0].case["nnz"] == pytest.approx(sum(nnz) / 2, abs=0.051)
    assert [(m.metric, m.ratio) for m in mean] == [(m.metric, m.ratio) for m in first]
    assert mean[0].sustained == first[0].sustained
    differences = [measurements[-1].value for measurements in (first, second, mean)]
    assert differences[2] == pytest.approx(sum(differences[:2]) / 2)


def test_means_are_ratios_of_means():
    layers = []
    for layer, (ours, dense) in enumerate([(100.0, 600.0), (300.0, 200.0)]):
        case = {"layer": layer, "nnz": 1.0, "measured_nnz": 1.0, "union_64": 1.0, "path": "sparse"}
        case["path"] = ("sparse", "dense")[layer]
        under = {"p10": ours - 1, "p90": ours + 1}
        layers.append(ffn_run.Measurement("ffn_train", case, "ms", ours, "ms", dense,
                                          dense / ours, sustained=under))  # fmt: skip
    [mean] = ffn_run.mean_over_layers([[layer] for layer in layers])
    assert (mean.value, mean.baseline, mean.ratio) == (200.0, 400.0, 2.0)
    assert mean.sustained == {"p10": 199.0, "p90": 201.0}
    assert mean.baseline_sustained is None
    assert (mean.case["layer"], mean.case["path"]) == ("mean", "sparse/dense")


def test_each_way_has_means_of_its_own(clock, traces):
    ways = ["--format", "union", "twell", "--precision", "bf16", "fp8"]
    measurements = run("ffn-train", "--pattern", "trace", "--traces", str(traces), *ways)
    ms = [each[0] for each in measurements]
    keys = [[m.case["layer"], m.case.get("format"), m.case.get("precision")] for m in ms]
    four = [[f, p] for f in (None, "twell") for p in (None, "fp8")]
    assert keys == [[layer, *way] for layer in (0, 1, "mean") for way in four]
    differences = [each[-1].value for each in measurements]
    for first, second, mean in zip(differences[:4], differences[4:8], differences[8:], strict=True):
        assert mean == pytest.approx((first + second) / 2)


@pytest.mark.parametrize("name", MODULES)
def test_token_order_is_measured_beside_the_natural_one(name, clock, monkeypatch, traces_with_ids):
    monkeypatch.setattr(
        ffn_run, "sustained", lambda configurations, device, seconds: clock_of_half(configurations)
    )

    def clock_of_half(configurations):
        return {name: timing.Timing({"sort": np.array([0.5])}) for name in configurations}

    words = ["--pattern", "trace", "--traces", str(traces_with_ids), "--M"]
    *measurements, natural_mean, ordered_mean = run(name, *words, "200")
    keys = [(each[0].case["layer"], each[0].case.get("token_order")) for each in measurements]
    assert keys == [(0, None), (0, "auto"), (1, None), (1, "auto")]
    stages = 2 if name == "ffn-train" else 1
    for natural, ordered in (measurements[:2], measurements[2:], (natural_mean, ordered_mean)):
        assert ordered[0].case["union_64"] != natural[0].case["union_64"]
        assert natural[0].value == stages
        assert ordered[0].value == stages + 0.5 / 2  # there are two layers
        assert ordered[0].baseline == natural[0].baseline == 2 * stages
    # Decoding has none, and repetitions would be sorted side by side. To TwELL it is all one.
    for more_words in (["400"], ["200", "--format", "twell"]):
        assert all("token_order" not in each[0].case for each in run(name, *words, *more_words))


def test_fewer_tokens_than_recorded_fire_as_recorded(traces):
    trace = load_traces(traces, 256)[0][1]
    traced = Traced(*fit_gate(trace.pattern(), 64), torch.from_numpy(trace.count_M.astype(int)))
    inputs = traced.layer(50)
    active = (inputs.x_MK.float() @ inputs.w_NK.float().t() > 0).sum(1)
    count = trace.count_M.astype(int)
    assert active.tolist() in [count[start : start + 50].tolist() for start in (0, 50, 100, 150)]
    assert inputs.nnz == active.float().mean()


def test_without_other_traces_those_of_the_checkout_are_measured(clock, traces, monkeypatch):
    monkeypatch.setattr(ffn_run, "SAMPLE_TRACES", traces)
    measurements = run("ffn", "--pattern", "trace", "--M", "100")
    assert [each[0].case["layer"] for each in measurements] == [0, 1, "mean"]
    assert {each[0].case["traces"] for each in measurements} == {"sample"}
    other = ["--traces", str(traces.rename(traces.parent / "a.npz"))]
    assert "traces" not in run("ffn", "--pattern", "trace", "--M", "100", *other)[0][0].case


@pytest.mark.parametrize("name", MODULES)
def test_what_is_skipped_says_why(name, clock, monkeypatch, traces, capsys):
    [measurements] = run(name, "--pattern", "trace", "uniform")
    why = "benchmarks/traces/sample/traces.npz does not exist; give --traces FILE, or make it: "
    output = capsys.readouterr().out
    assert output == f"skipped: M 128 64/256 trace: {why}{SAMPLE_COMMANDS}\n"
    assert measurements[0].metric == "ms"

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(ffn_cases, "synthetic_layer", full)
    assert run(name, "--pattern", "uniform") == []
    output = capsys.readouterr().out
    assert output == (
        "skipped: M 128 64/256 uniform nnz 20: CUDA out of memory. Tried to allocate 9 GiB\n"
    )


def test_ids_of_another_trace_are_refused(clock, traces, tmp_path):
    other = tmp_path / "other.npz"
    np.savez(other, ids=np.zeros((3, 50), int), **np.load(traces))
    with pytest.raises(ValueError, match=r"other.npz: ids \(3, 50\) are not .* of 200 tokens"):
        run("ffn", "--pattern", "trace", "--traces", str(other))


def test_a_trace_file_that_is_not_there_is_an_error(clock, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such trace file"):
        run("ffn", "--traces", str(tmp_path / "absent.npz"))


# --- what is timed --------------------------------------------------------------------------------


def test_a_wrong_result_has_no_time(clock, monkeypatch, capsys):
    forward = SparseFFN.forward
    monkeypatch.setattr(SparseFFN, "forward", lambda self, x: forward(self, x) * 1.1)
    monkeypatch.setattr(ffn_forward.sparsellm, "accelerate", lambda *_, **__: Acceleration())
    assert run("ffn", "--pattern", "uniform") == []
    wrong = "ours (union) differs from dense by 10.0%; wrong results are not timed\n"
    assert capsys.readouterr().out.endswith(wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("the gradient of x", lambda y, l1: (1.1 * y - 0.1 * y.detach(), l1)),
        ("the gradient of x", lambda y, l1: (y, 2 * l1 - l1.detach())),
        ("the L1 sum", lambda y, l1: (y, 1.1 * l1)),
        ("y", lambda y, l1: (1.1 * y, l1)),
    ],
)
def test_a_wrong_gradient_has_no_time(clock, monkeypatch, capsys, name, wrong):
    compute = SparseFFN.compute

    def off(self, x, capacity, order=None):
        y, stats = compute(self, x, capacity, order)
        if capacity:
            y, l1_sum = wrong(y, stats.l1_sum)
            stats = stats._replace(l1_sum=l1_sum)
        return y, stats

    monkeypatch.setattr(SparseFFN, "compute", off)
    assert run("ffn-train", "--pattern", "uniform") == []
    assert f"uniform nnz 20: {name} differs from dense" in capsys.readouterr().out


def off(actual, expected):
    return (actual.float() - expected.float()).norm() / expected.float().norm()


def test_both_sides_give_the_gradients_of_x_and_all_weights(clock):
    case = Case(128, GATED, "uniform", 20)
    bench = ffn_run.FFNBench(options("ffn-train", *SMALL), CPU)
    layer = ffn_cases.synthetic_layer(case, CPU)
    steps, results = ffn_train.new_steps(bench, layer)
    assert all(off(ours, dense) < 0.01 for _, ours, dense in results())
    shapes = [(128, 64), (256, 64), (256, 64), (64, 256)]
    gradients = {name: step.backward(step.forward()) for name, step in steps.items()}
    assert all([tuple(g.shape) for g in tensors] == shapes for tensors in gradients.values())
    assert {name: len(step.forward()) for name, step in steps.items()} == {"dense": 1, "ours": 2}
    # Dense has no L1; without it the two agree.
    ours = steps["ours"]
    plain = torch.autograd.grad(ours.forward()[0], ours.inputs, ours.d_outputs[0])
    for a, b in zip(plain, gradients["dense"], strict=True):
        assert off(a, b) < 0.01
    assert not layer.x_MK.requires_grad


def test_ours_has_the_room_that_training_settles_on(clock, monkeypatch):
    compute, capacities = SparseFFN.compute, []

    def spy(self, x, capacity, order=None):
        capacities.append(capacity)
        return compute(self, x, capacity, order)

    monkeypatch.setattr(SparseFFN, "compute", spy)
    [measurements] = run("ffn-train", "--M", "1024", "--nnz", "2", "--pattern", "uniform")
    room = size_for(1.25 * measurements[0].case["union_64"] * 16)
    assert room < 16 * 256
    assert capacities.pop(0) == 0  # to count
    assert capacities.count(None) == 1  # dense, to compare with
    assert set(capacities) == {room, None}


def test_memory_is_that_of_what_is_kept_and_of_the_peak(monkeypatch):
    mib = 2**20
    allocated, events = iter([10 * mib, 20 * mib] * 2), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 45 * mib)

    class Step:
        def forward(self):
            events.append("forward")
            return (torch.empty(mib), torch.empty(mib, dtype=torch.int8))  # 4 MiB and 1

        def backward(self, outputs):
            events.append(len(outputs))

    held, peak = ffn_train.memory({"ours": Step(), "dense": Step()}, {"M": 1})
    assert (held.metric, held.value, held.unit, held.ratio) == ("memory_MiB", 5.0, "MiB", 1.0)
    assert (peak.metric, peak.value) == ("peak_MiB", 35.0)
    assert events == 2 * ["reset", "forward", 2]


def test_the_command_records_case_by_case(clock, monkeypatch, tmp_path, capsys):
    measure = ffn_train.measure
    monkeypatch.setattr("sparsellm.bench.cli.may_have_gpu", lambda: True)
    monkeypatch.setattr(ffn_train, "measure", lambda options: measure(options, CPU))
    monkeypatch.setattr("sparsellm.bench.record.hardware", lambda: "none")
    monkeypatch.setenv(FORCED, "portable")
    path = tmp_path / "results.jsonl"
    command = ["bench", "ffn-train", *SMALL, "--record", str(path)]
    assert cli.main([*command, "--pattern", "uniform", "skewed"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    metrics = ["ms", "forward_ms", "backward_ms", "mJ_per_token", "difference"]
    assert [line["metric"] for line in lines] == 2 * metrics
    assert {line["case"]["arch"] for line in lines} == {"portable"}
    assert lines[0]["baseline_sustained"]["p90"] == 4.4
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ffn_train M=128 K=64 N=256 gated=True pattern=uniform ")
    assert ": ms 2 (1.8 to 2.2; 600 W at 1,500 MHz; 2.00× of 4), forward_ms 1 ms (" in printed[0]
    monkeypatch.setattr(Layer, "most_off", -1.0)
    assert cli.main([*command, "--pattern", "uniform"]) == 1
    captured = capsys.readouterr()
    assert "skipped: M 128 64/256 uniform nnz 20: y differs" in captured.out
    assert captured.err == "error: no case was measured; the reasons are above\n"


@pytest.mark.parametrize("name", MODULES)
def test_all_of_it_runs_on_a_real_clock(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    [measurements] = run(name, "--pattern", "uniform", "--seconds", "0.01")
    ms = measurements[0]
    assert 0 < ms.sustained["p10"] <= ms.value <= ms.sustained["p90"]
    assert 0 < ms.baseline_sustained["p10"] <= ms.baseline
    assert "watts" not in ms.sustained
    assert "mJ_per_token" not in {m.metric for m in measurements}
