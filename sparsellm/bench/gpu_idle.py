"""The share of a training step in which the GPU computes nothing, and what it computes otherwise.

`gpu_idle` is 1 − busy / step. `busy` is the time in which at least one kernel or copy runs, from
torch.profiler over a few steps. `step` is the time of a step without the profiler, just before:
the profiler makes each launch slower, and so a GPU that waits for its host idler. It is taken from
the end of one step on the host to that of a later one, each of which has waited for the GPU: to
wait for all of its work, as at the beginning of a measurement, would make it idle. The gaps of the
timeline are those under the profiler.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sparsellm.bench.gpu_timeline import Interval, Timeline, busy_us, timeline
from sparsellm.bench.record import Measurement, vocabulary_key, weight_gradients_key
from sparsellm.recipe import Recipe
from sparsellm.training.begin import warm_up
from sparsellm.training.run import Run, build_run, close_run
from sparsellm.training.run_state import initialise_run
from sparsellm.training.signals import StopRequest
from sparsellm.training.step import train_step
from sparsellm.training.step_start import may_begin_next


def run(
    recipe: Recipe, init_from: Path | None, warm_up_steps: int, steps: int
) -> tuple[list[Measurement], Timeline]:
    """Trains, times ``steps`` steps and profiles as many more. Nothing is saved.

    All ranks must call it; the figures are those of each rank's own GPU.

    Args:
        recipe: what to train.
        init_from: checkpoint of the first weights; None begins with the recipe's.
        warm_up_steps: steps before anything is measured.
        steps: steps that are timed, and that are profiled.

    Raises:
        ValueError: no CUDA device, or the checkpoint is not of this model.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench idle measures a GPU and needs a CUDA device")
    training = build_run(recipe, random_weights=init_from is None)
    try:
        warm_up(training)
        if init_from is not None:
            initialise_run(training, init_from)
        return measure(training, warm_up_steps, steps)
    finally:
        close_run(training)


def measure(training: Run, warm_up_steps: int, steps: int) -> tuple[list[Measurement], Timeline]:
    """`run`, of a run that has been built."""
    _train(training, warm_up_steps)
    step_us = _train(training, steps) / steps  # from where the warm-up ended
    torch.cuda.synchronize()
    intervals = _profiled(training, steps)
    return _measurements(training, step_us, intervals, steps), timeline(intervals, steps)


def _train(training: Run, steps: int) -> float:
    """Microseconds of so many steps on the host, which waits for the GPU in each."""
    began = time.perf_counter()
    for _ in range(steps):
        train_step(training, StopRequest(), begin_next=may_begin_next(training))
    return (time.perf_counter() - began) * 1e6


def _profiled(training: Run, steps: int) -> list[Interval]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _train(training, steps)
        torch.cuda.synchronize()
    return [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        # Annotations, such as that of the optimizer, span kernels and the gaps between them.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def _measurements(
    training: Run, step_us: float, intervals: list[Interval], steps: int
) -> list[Measurement]:
    recipe, busy = training.recipe, busy_us(intervals) / steps
    case = {
        "recipe": recipe.name,
        **vocabulary_key(recipe),
        "layers": recipe.model.num_hidden_layers,
        "gpus": training.accelerator.num_processes,
        "kernels": recipe.ffn.kernels,
        **weight_gradients_key(recipe),
        "global_batch_tokens": recipe.train.global_batch_tokens,
        "micro_batch_size": training.micro_batch.size,
    }
    sparse = sum(ffn.path == "sparse" for ffn in training.ffns)
    values = [
        ("gpu_idle", 1 - busy / step_us, "of a step"),
        ("busy", busy / 1e3, "ms per step"),
        ("step", step_us / 1e3, "ms"),
        ("launches", len(intervals) / steps / training.rounds, "kernels and copies a micro-batch"),
        ("sparse_layers", sparse, "layers"),
    ]
    return [Measurement("idle", case, name, value, unit) for name, value, unit in values]
