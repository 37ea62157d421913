"""One step: for what the host waits, and what its time is counted as."""

import math
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sparsellm
from sparsellm.ffn.kernels.compiler.compile import compile_seconds
from sparsellm.processes.distributed import RankActivity
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe.estimate import train_flops_per_token
from sparsellm.training import meter as meter_module
from sparsellm.training.meter import Meter, progress_line
from sparsellm.training.step import train_step

PACKAGE = str(Path(sparsellm.__file__).parent)


class _SingleValues(TorchDispatchMode):
    """Counts the values that the host reads one by one, each of which waits for the device."""

    def __init__(self):
        super().__init__()
        self.read = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.read += operator.name() == "aten::_local_scalar_dense"
        return operator(*args, **(kwargs or {}))


class _Passed:
    """Notes the package's functions that are called in a ``with`` block."""

    def __enter__(self):
        self.functions = set()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        if event == "call" and PACKAGE in code.co_filename and not code.co_name.startswith("<"):
            self.functions.add(code)


@pytest.mark.parametrize(
    ("kernels", "files", "functions"), [("dense", 14, 60), ("sparse", 21, 108)]
)
def test_a_step_passes_few_files_and_functions(build, kernels, files, functions):
    """Whoever reads one must read them all: what makes them more has to be worth that."""
    overrides = ["logging.every_steps=1", "runtime.compile=false", f"ffn.kernels={kernels}"]
    run, stop = build(*overrides), StopRequest()
    for _ in range(3):  # which read the text that the next one needs
        train_step(run, stop, launch_next=True)
    with _Passed() as passed:
        train_step(run, stop, launch_next=True)
    assert len({code.co_filename for code in passed.functions}) <= files
    assert 40 < len(passed.functions) <= functions


def test_a_step_reads_its_sums_at_once_and_nothing_else(build):
    run = build("logging.every_steps=100", "sparsity.target_nnz=8", "runtime.compile=false")
    train_step(run, StopRequest())  # is logged
    with _SingleValues() as values:
        train_step(run, StopRequest())
    assert values.read == 0


@pytest.mark.parametrize("order", ["none", "auto"])
def test_unions_depend_on_the_micro_batch_only_through_the_order_of_its_tokens(build, order):
    settings = ["model.context_length=64", "train.global_batch_tokens=512", "ffn.kernels=sparse"]
    settings += [
        "validation.every_steps=0",
        "runtime.compile=false",
        f"runtime.token_order={order}",
    ]
    unions = []
    for size in (1, 8):
        run = build(*settings, f"train.micro_batch_size={size}")
        unions.append(train_step(run, StopRequest()).reading.kernels.union_mean)
    assert (unions[0] == unions[1]) == (order == "none")


def test_compilation_and_pauses_are_no_time_of_training(build):
    def compiled(number):
        before = compile_seconds()
        torch.compile(lambda x: x.sin() * number, backend="eager", dynamic=False)(torch.ones(8))
        return compile_seconds() - before

    run = build("logging.every_steps=1", "runtime.compile=false")
    startup = compiled(2.0)  # as before the first step
    began = time.perf_counter()
    meter = Meter(run)
    totals = train_step(run, StopRequest())
    step = time.perf_counter() - began
    inside = compiled(3.0)
    meter.pause()
    paused = time.perf_counter()
    outside = compiled(4.0)  # as a validation does
    resumed = time.perf_counter()
    meter.resume()
    values = meter.record(run, totals).values
    wall = time.perf_counter() - began - (resumed - paused)
    assert min(startup, inside, outside) > 0
    assert values["compile_seconds"] == pytest.approx(startup + inside + outside)
    assert 0.9 * step < values["train_seconds"] <= wall - inside


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_utilisation_is_of_the_bf16_peak_and_unknown_in_fp32(build, monkeypatch, precision):
    monkeypatch.setattr(meter_module, "peak_flops", lambda name: 1e12)
    run = build("runtime.compile=false", f"runtime.precision={precision}")
    meter = Meter(run)
    totals = train_step(run, StopRequest())
    record = meter.record(run, totals)
    assert record.l1_by_layer == totals.l1_by_layer
    values = record.values
    seconds = values["step_ms"] / 1e3
    assert values["tokens_per_second"] == pytest.approx(256 / seconds)
    if precision == "fp32":
        assert (values["mfu"], values["mfu_dense"]) == (None, None)
    else:
        flops = train_flops_per_token(run.recipe)
        assert values["mfu_dense"] == pytest.approx(values["tokens_per_second"] * flops / 1e12)
        # Dense kernels execute what a dense model does.
        assert values["mfu"] == pytest.approx(values["mfu_dense"])


def test_the_time_that_is_left_follows_from_the_rate(build):
    run = build("runtime.compile=false", "train.steps=4")
    meter = Meter(run)
    record = meter.record(run, train_step(run, StopRequest()))
    record.values["tokens_per_second"] = run.recipe.train.global_batch_tokens / 60  # one per minute
    assert progress_line(record, run.recipe).endswith("| eta 0:03:00")


def test_a_step_is_watched_under_the_number_of_finished_ones(build, monkeypatch):
    phases = []
    monkeypatch.setattr(RankActivity, "begin", lambda self, *phase: phases.append(phase))
    run = build("runtime.compile=false")
    for finished in range(2):
        phases.clear()
        train_step(run, StopRequest())
        steps = {step for phase, step in phases if phase in ("reading data", "computing")}
        assert steps == {finished}


def test_the_coefficient_moves_slowly_while_the_learning_rate_warms_up(build):
    moved = []
    for warmup in (1, 1000):
        overrides = [
            "sparsity.target_nnz=1",
            f"optimizer.warmup_steps={warmup}",
            "runtime.compile=false",
        ]
        run = build(*overrides)
        first, second = (train_step(run, StopRequest()).l1_by_layer[0] for _ in range(2))
        moved.append(math.log(second / first))
    assert 0 < moved[1] < moved[0] / 10


def test_a_dead_neuron_alone_is_reinitialised_after_the_step(build):
    overrides = [
        "sparsity.reinit_rate=0.1",
        "sparsity.dead_window_tokens=256",
        "runtime.compile=false",
    ]
    run = build(*overrides)
    weight_NK = run.ffns[0].pattern_weight
    with torch.no_grad():
        weight_NK[3] = 0  # is never active, and has no gradient
    before_NK = weight_NK.detach().clone()
    train_step(run, StopRequest())
    std = 0.1 * run.recipe.model.initializer_range
    assert float(weight_NK[3].detach().std()) == pytest.approx(std, rel=0.4)
    alive_N = run.stats.silent_tokens_LN[0] == 0
    assert (weight_NK - before_NK)[alive_N].abs().max() < 2 * run.recipe.optimizer.learning_rate
