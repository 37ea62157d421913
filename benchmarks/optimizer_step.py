"""Times one step of the optimizer: AdamW's, Muon's, and Muon's with normalised neurons.

    accelerate launch --config_file launch/fsdp2.yaml benchmarks/optimizer_step.py \\
        --recipe 2b --set runtime.precision=fp8 --record benchmarks/results.jsonl

Model, layout and parameter groups are those of a training run in the layout of a launch
configuration; gradients are random numbers. The baseline of Muon's times is AdamW's, and their
ratio says how many times longer Muon takes.
"""

import argparse
import shlex
import statistics
import time
from pathlib import Path

import torch

from sparsellm.bench.record import Measurement, append, row
from sparsellm.bench.train_runs import NO_GATE_RATE
from sparsellm.processes.launched import one_node
from sparsellm.recipe import load_recipe
from sparsellm.sparsity.over_ranks import largest
from sparsellm.training.optimization.optimizer import build_optimizer
from sparsellm.training.run import Run, build_run, close_run

QUIET = ["validation.every_steps=0", "train.micro_batch_size=1", "ffn.kernels=dense"]
WARM_STEPS = 3  # allocate the optimizer's state and compile its kernels


def main(arguments: list[str] | None = None) -> None:
    """Prints the figures of the first rank, and records them with ``--record``."""
    parser = argparse.ArgumentParser(description="Times one step of the optimizer.")
    parser.add_argument("--recipe", required=True, help="a bundled recipe or a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append to FILE")
    options = parser.parse_args(arguments)
    overrides = [*QUIET, *options.set, *NO_GATE_RATE, "optimizer.normalize_neurons=false"]
    run = build_run(load_recipe(options.recipe, overrides))
    case = {
        "recipe": run.recipe.name,
        "gpus": run.accelerator.num_processes,
        "config": layout(run),
        "precision": run.recipe.runtime.precision,
    }
    words = ["--recipe", options.recipe, "--steps", str(options.steps), *repeated(options.set)]
    context = {"command": command(run, "optimizer_step", words)}
    measurements: list[Measurement] = []
    for name, normalize in (("adamw", False), ("muon", False), ("muon", True)):
        settings = [f"optimizer.name={name}", f"optimizer.normalize_neurons={normalize}"]
        recipe = load_recipe(options.recipe, [*overrides, *settings])
        optimizer = build_optimizer(run.objective, recipe)
        milliseconds = statistics.median(step_milliseconds(run, optimizer, options.steps))
        del optimizer
        baseline = measurements[0].value if measurements else None
        ratio = milliseconds / baseline if baseline else None
        figure = (milliseconds, "ms", baseline, ratio)
        of = case | {"optimizer": name} | ({"normalize_neurons": True} if normalize else {})
        measurements.append(Measurement("optimizer_step", of, "step_ms", *figure, context=context))
    if run.accelerator.is_main_process:
        for measurement in measurements:
            print(row([measurement]))
        if options.record:
            append(measurements, options.record)
    close_run(run)


def command(run: Run, script: str, words: list[str]) -> str:
    """With which a script of this folder measures again, as the run was launched."""
    launch = ["python"]
    if (ranks := run.accelerator.num_processes) > 1:
        launch = ["accelerate", "launch", "--config_file", f"launch/{layout(run)}.yaml"]
        launch += ["--num_processes", str(ranks)]
        if (sizes := run.accelerator.parallelism_config) is not None:
            launch += one_node(sizes.dp_replicate_size, sizes.dp_shard_size)
    return shlex.join([*launch, f"benchmarks/{script}.py", *words])


def repeated(overrides: list[str]) -> list[str]:
    """Overrides as words of a command."""
    return [word for override in overrides for word in ("--set", override)]


def layout(run: Run) -> str:
    """The launch configuration, by what accelerate made of it."""
    if run.accelerator.num_processes == 1:
        return "single"
    if not run.accelerator.is_fsdp2:
        return "ddp8"
    return "fsdp2" if run.accelerator.parallelism_config is None else "hsdp"


def step_milliseconds(run: Run, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Of each step, the time of the rank that took longest."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    device, times = run.accelerator.device, []
    for step in range(WARM_STEPS + steps):
        run.accelerator.wait_for_everyone()
        _finish(device)
        begin = time.perf_counter_ns()
        optimizer.step()
        _finish(device)
        nanoseconds = largest(time.perf_counter_ns() - begin, device)
        if step >= WARM_STEPS:
            times.append(nanoseconds / 1e6)
    optimizer.zero_grad()
    return times


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
