"""Throughput of training by the size of its micro-batches, all in one process.

    accelerate launch --config_file launch/fsdp2.yaml --num_processes 2 \\
        benchmarks/micro_batches.py --recipe 2b --sizes 16 8 4 \\
        --set train.global_batch_tokens=131072 --record benchmarks/results.jsonl

The run first trains for ``--settle`` steps, until its layers are sparse. Then a tiny learning rate
keeps the weights as they are, so that all sizes and optimizers are measured at the same sparsity.
`sparsellm bench train` starts a process for every setting instead, from a checkpoint.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

import optimizer_step
from sparsellm.bench.record import Measurement, append, row
from sparsellm.bench.train_runs import HOLD, QUIET
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import load_recipe
from sparsellm.sparsity.over_ranks import largest
from sparsellm.training import rehearsal
from sparsellm.training.optimization.optimizer import build_optimizer
from sparsellm.training.resume.run_state import first_state
from sparsellm.training.run import Run, build_run, close_run, resize
from sparsellm.training.step import StepTotals, train_step

WARM_STEPS = 3  # at a new size, or of a new optimizer


def main(arguments: list[str] | None = None) -> None:
    """Prints the figures of the first rank, and records them with ``--record``."""
    parser = argparse.ArgumentParser(description="Throughput by the size of micro-batches.")
    parser.add_argument("--recipe", required=True, help="a bundled recipe or a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="in sequences")
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"])
    parser.add_argument("--settle", type=int, default=60, help="steps before the first timed one")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each setting")
    parser.add_argument(
        "--profile", action="store_true", help="print what the host did in a step of the last size"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="append to FILE")
    options = parser.parse_args(arguments)
    overrides = [*QUIET, "train.micro_batch_size=auto", *options.set]
    run = build_run(load_recipe(options.recipe, overrides))
    resize(run, options.sizes[0])
    first_state(run, None, None)
    run.loader.start()
    rehearsal.warm_up(run)
    measurements = []
    with StopRequest() as stop:
        if options.settle:
            _train(run, stop, options.settle)
        for name in options.optimizers:
            run.optimizer.state.clear()
            held = [*overrides, f"optimizer.name={name}", *HOLD]
            run.recipe = load_recipe(options.recipe, held)
            run.optimizer = build_optimizer(run.objective, run.recipe)
            for size in options.sizes:
                resize(run, size)
                measurements.append(_measure(run, stop, name, options.steps))
                run.accelerator.print(row(measurements[-1:]))
        if options.profile:
            with torch.profiler.profile() as profile:
                _train(run, stop, 1)
            table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
            run.accelerator.print(table)
    if options.record and run.accelerator.is_main_process:
        context = {"command": _command(run, options)}
        append([replace(m, context=context) for m in measurements], options.record)
    close_run(run)


def _command(run: Run, options: argparse.Namespace) -> str:
    words = ["--recipe", options.recipe, "--sizes", *map(str, options.sizes)]
    words += ["--optimizers", *options.optimizers, "--settle", str(options.settle)]
    words += ["--steps", str(options.steps), *optimizer_step.repeated(options.set)]
    return optimizer_step.command(run, "micro_batches", words)


def _train(run: Run, stop: StopRequest, steps: int) -> tuple[list[float], StepTotals]:
    """The seconds of each step on this rank, and the last step's results."""
    seconds = []
    for number in range(1, steps + 1):
        begin = time.perf_counter()
        totals = train_step(run, stop, launch_next=number < steps)
        seconds.append(time.perf_counter() - begin)
    return seconds, totals


def _measure(run: Run, stop: StopRequest, optimizer: str, steps: int) -> Measurement:
    """Tokens per ms and GPU at the present size: the median step of the slowest rank."""
    _train(run, stop, WARM_STEPS)
    seconds, totals = _train(run, stop, steps + 1)
    nanoseconds = round(statistics.median(seconds[:-1]) * 1e9)  # the last one queues no other
    milliseconds = largest(nanoseconds, run.accelerator.device) / 1e6
    ranks = run.accelerator.num_processes
    tokens = run.recipe.train.global_batch_tokens // ranks
    case = {
        "recipe": run.recipe.name,
        "gpus": ranks,
        "config": optimizer_step.layout(run),
        "precision": run.recipe.runtime.precision,
        "optimizer": optimizer,
        "tokens_per_gpu_and_step": tokens,
        "micro_batch_size": run.micro_batch.size,
        "measured_nnz": round(statistics.fmean(totals.reading.nnz_L), 1),
        "sparse_layers": sum(totals.reading.kernels.sparse),
    }
    value = tokens / milliseconds
    return Measurement("micro_batches", case, "tokens_per_ms", value, "tokens/ms per GPU")


if __name__ == "__main__":
    main()
