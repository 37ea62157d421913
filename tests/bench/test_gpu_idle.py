"""Idle time: its arithmetic on made-up intervals, and a real profile of CPU operators."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import process_env, set_arguments
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from sparsellm.bench import gpu_idle
from sparsellm.bench.gpu_timeline import Gap, Interval, KernelTime, busy_us, by_name, timeline
from sparsellm.training.run import build_run, close_run


def _intervals(*bounds):
    return [Interval("a", start, end) for start, end in bounds]


@pytest.mark.parametrize(
    ("bounds", "busy"),
    [
        ([], 0),
        ([(1, 3), (5, 9)], 6),
        ([(5, 9), (1, 3)], 6),  # in any order
        ([(1, 3), (2, 6)], 5),  # overlap
        ([(1, 9), (2, 3), (4, 5)], 8),  # within another
        ([(1, 9), (2, 3), (8, 10)], 9),
        ([(1, 3), (3, 4)], 3),  # next to each other
        ([(1, 3), (1, 3)], 2),
        ([(2, 2), (-4, -1)], 3),
    ],
)
def test_the_gpu_is_busy_while_any_kernel_runs(bounds, busy):
    assert busy_us(_intervals(*bounds)) == busy


def test_kernels_are_summed_by_name_without_template_arguments():
    intervals = [
        Interval("void gemm<bf16, 64>(float*)", 0, 3000),
        Interval("void gemm<fp32>(float*)", 1000, 2000),
        Interval("triton_per_fused_add_0", 0, 500),
        Interval("gate_union", 0, 9000),
    ]
    assert by_name(intervals, steps=2) == [
        KernelTime("gate_union", 4.5, 0.5),
        KernelTime("gemm", 2.0, 1.0),
        KernelTime("triton_per_fused_add_0", 0.25, 0.5),
    ]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, "
            "std::array<char*, 1ul> >(int, at::native::FillFunctor<int>, std::array<char*, 1ul>)",
            "at::native::vectorized_elementwise_kernel FillFunctor",
        ),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
            "at::TensorIteratorBase&)::{lambda()#3}::operator()() const>(int)",
            "at::native::unrolled_elementwise_kernel direct_copy_kernel_cuda",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
            "at::native::func_wrapper_t<float, at::native::sum_functor<float>>>>(int)",
            "at::native::reduce_kernel sum_functor",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
            "at::native::NormTwoOps<float, float>, unsigned int, float, 4> >(int)",
            "at::native::reduce_kernel NormTwoOps",
        ),
        ("at::native::multi_tensor()", "at::native::multi_tensor"),
        ("gemm_ReduceOp<FillFunctor>(int)", "gemm_ReduceOp"),
    ],
)
def test_kernels_of_torch_are_named_with_their_operation(name, short):
    assert [kernel.name for kernel in by_name([Interval(name, 0, 1)], steps=1)] == [short]


def test_gaps_are_summed_by_the_kernels_around_them():
    intervals = [
        Interval("up", 0, 1000),
        Interval("down<64>", 900, 2000),
        Interval("up", 1002, 1500),  # within `down`, which still runs
        Interval("sum", 2003, 3000),  # queued in time
        Interval("down<64>", 3500, 4000),
        Interval("up", 4000, 4100),
        Interval("down<32>", 5000, 5100),
        Interval("sum", 5200, 5300),
        Interval("down", 5900, 6000),
    ]
    found = timeline(intervals, steps=2)
    assert found.waits == [
        Gap("sum", "down", 0.55, 1.0),
        Gap("up", "down", 0.45, 0.5),
        Gap("down", "sum", 0.05, 0.5),
    ]
    assert found.launch_gaps_ms == pytest.approx(0.0015)
    assert found.kernels == by_name(intervals, steps=2)


def test_steps_are_timed_before_they_are_profiled(tiny, monkeypatch):
    # CPU operators in place of kernels: they nest, so that their sum exceeds their union.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_idle, "ProfilerActivity", SimpleNamespace(CUDA=ProfilerActivity.CPU))
    monkeypatch.setattr(gpu_idle, "DeviceType", SimpleNamespace(CUDA=DeviceType.CPU))
    trained, train = [], gpu_idle._train
    monkeypatch.setattr(gpu_idle, "_train", lambda run, n: (trained.append(n), train(run, n))[1])
    training = build_run(tiny())
    try:
        found, seen = gpu_idle.measure(training, warm_up_steps=1, steps=2)
    finally:
        close_run(training)
    assert trained == [1, 2, 2]
    by_metric = {m.metric: m.value for m in found}
    assert by_metric["step"] > 0
    assert by_metric["gpu_idle"] == pytest.approx(1 - by_metric["busy"] / by_metric["step"])
    assert 0 < by_metric["busy"] < sum(kernel.ms for kernel in seen.kernels)
    assert any("mm" in kernel.name for kernel in seen.kernels)
    assert found[0].case["micro_batch_size"] == 2


def test_without_a_gpu_it_says_so(cli_here, tiny_overrides):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    found = cli_here("bench", "idle", "--recipe", "debug", *set_arguments(tiny_overrides))
    assert found.returncode == 1
    assert "bench idle measures a GPU and needs a CUDA device" in found.stderr


@pytest.mark.slow
def test_a_rank_ends_with_its_launcher():
    rank = (
        "import time\n"
        "from sparsellm.bench import gpu_idle\n"
        "from sparsellm.cli import main\n"
        "gpu_idle.run = lambda *_: (print('begun', flush=True), time.sleep(60))\n"
        "main(['bench', 'idle', '--recipe', 'debug'])\n"
    )
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", launcher, rank],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=process_env(LOCAL_RANK="0"),
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.kill()
        _, said = process.communicate(timeout=30)  # its pipes are open until the rank has ended
    assert said == "error: the launcher of this rank has died, so the rank ends; start it again\n"
