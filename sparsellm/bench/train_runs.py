"""Whole training runs through `accelerate launch`: throughput, memory, energy and scaling.

Every combination of GPUs, launch configuration and overrides is a run of its own; the dense one
comes first and is the baseline of the others. A single GPU is launched by launch/single.yaml, and
is the baseline of scaling. All runs start from the same weights, whose sparsity should be in its
steady state. A tiny constant learning rate keeps them as they are; with a fresh optimizer at the
recipe's learning rate, the sparsity would change.

Figures are kept in the folder, so the same command resumes where it was interrupted.
"""

import argparse
import hashlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsellm.bench.record import Measurement, hardware
from sparsellm.bench.timing import Reading, counters
from sparsellm.bench.train_figures import MIN_STEADY, Figures, figures, measurements
from sparsellm.device import pick_device, refuse_sparse_without_gpu
from sparsellm.processes.launched import launch_config, train_command, watch
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.runs.files import write_atomically
from sparsellm.runs.huggingface.find import find_checkpoint
from sparsellm.runs.huggingface.recipe_of import recipe_for
from sparsellm.runs.telemetry.session import commit

SINGLE = "single"  # the launch configuration of one GPU
DENSE = "ffn.kernels=dense"
MIN_STEPS = 2 * MIN_STEADY
QUIET = ["checkpoint.every_steps=0", "validation.every_steps=0", "evaluation.every_steps=0"]
QUIET += ["logging.wandb=disabled", "logging.every_steps=1"]
# A number would stay where learning_rate is overridden, and adamw refuses one.
NO_GATE_RATE = ["optimizer.gate_learning_rate=null", "optimizer.gate_optimizer=null"]
HOLD = ["optimizer.learning_rate=1e-6", "optimizer.warmup_steps=0", "optimizer.min_lr_ratio=1"]
HOLD += NO_GATE_RATE
_USUAL_VOCABULARY = 50_304  # GPT-2's, padded


class Setting(NamedTuple):
    """One run."""

    gpus: int
    config: str  # a file of launch/
    side: str  # overrides of the recipe, joined by commas

    def __str__(self) -> str:
        return f"{self.config} × {self.gpus}, {self.side}"


def settings(options: argparse.Namespace) -> list[Setting]:
    """All combinations, baselines first."""
    return [
        Setting(gpus, config, side)
        for gpus in sorted(set(options.gpus))
        for config in (dict.fromkeys(options.config) if gpus > 1 else [SINGLE])
        for side in dict.fromkeys([DENSE, *options.side])
    ]


def measure(options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """Measures run by run; each yielded result is final.

    Raises:
        ValueError: a run is impossible here, or some of them failed.
    """
    # SIGTERM, as from `timeout`, acts like Ctrl-C: it ends the launched processes, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    check(options)
    failed = []
    figures_of: dict[Setting, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="sparsellm-bench-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for setting in settings(options):
            try:
                run_figures = _figures(options, setting, folder)
            except (ValueError, OSError) as error:
                failed.append(str(setting))
                print(f"failed: {setting}: {error}", flush=True)
                continue
            dense = figures_of.get(setting._replace(side=DENSE))
            alone = figures_of.get(setting._replace(gpus=1, config=SINGLE))
            figures_of[setting] = run_figures
            yield measurements(_case(options, setting), run_figures, dense, alone)
    if failed:
        raise ValueError(f"the reasons are above: {len(failed)} failed ({'; '.join(failed)})")


def check(options: argparse.Namespace) -> None:
    """Refuses impossible runs before anything is started.

    Raises:
        ValueError: the message says why and what to do.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu and max(options.gpus) > (count := torch.cuda.device_count()):
        raise ValueError(f"--gpus {max(options.gpus)}: this machine has {count}")
    if options.steps < MIN_STEPS:
        raise ValueError(f"--steps {options.steps}: at least {MIN_STEPS} are needed")
    if options.init_from:
        find_checkpoint(options.init_from)  # raises here, not in the first launch
    for setting in settings(options):
        path = launch_config(setting.config)
        if not on_gpu and "fsdp_config" in path.read_text(encoding="utf-8"):
            raise ValueError(f"--config {setting.config}: accelerate shards over CUDA devices only")
        recipe = recipe_of(options, setting)
        recipe.accumulation_steps(setting.gpus)
        if recipe.ffn.kernels == "sparse":
            refuse_sparse_without_gpu(f"--side {setting.side}", pick_device(None), "leave it out")
        if recipe.train.micro_batch_size == "auto":
            raise ValueError(
                f"train.micro_batch_size of {recipe.name} is auto, which grows while a run is "
                "measured: give a size, such as --set train.micro_batch_size=8"
            )


def recipe_of(options: argparse.Namespace, setting: Setting) -> Recipe:
    """The recipe of a run."""
    return load_recipe(options.recipe, _overrides(options, setting))


def _overrides(options: argparse.Namespace, setting: Setting) -> list[str]:
    """Overrides of a run: the defaults, the user's, and those of ``--side``; later ones win."""
    overrides = [*QUIET, *(HOLD if options.init_from else []), *options.overrides]
    overrides += setting.side.split(",")
    if options.tokens_per_gpu:
        overrides.append(f"train.global_batch_tokens={options.tokens_per_gpu * setting.gpus}")
    return [*overrides, f"train.steps={options.steps}"]


def _figures(options: argparse.Namespace, setting: Setting, folder: Path) -> Figures:
    """Trains one setting, or takes the figures that were kept of it.

    Raises:
        ValueError: the launch fails, or sparsity is not in its steady state.
    """
    overrides, recipe = _overrides(options, setting), recipe_of(options, setting)
    # By what they depend on: a recipe's file changes under its name, and a run's newest checkpoint.
    weights = options.init_from and str(find_checkpoint(options.init_from))
    key = repr((recipe.to_yaml(), setting, weights, commit(), hardware()))
    name = f"{setting.config}-{setting.gpus}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    figures_path = folder / f"{name}.json"
    if figures_path.is_file():
        return Figures(**json.loads(figures_path.read_text(encoding="utf-8")))
    folder.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="runs-", dir=folder))
    overrides += [f"name={name}", f"logging.run_dir={runs}"]
    command = train_command(
        setting.config, setting.gpus, options.recipe, overrides, options.init_from
    )
    on_gpu = torch.cuda.is_available()
    gpus = [torch.device("cuda", index) for index in range(setting.gpus)] if on_gpu else []
    readers = [read for gpu in gpus if (read := counters(gpu))]  # empty without energy counters
    readings: dict[int, Reading] = {}
    with closing(watch(command, runs / name)) as run:
        for records in run:
            if readers and records and (step := records[-1]["step"]) not in readings:
                now = [read(step) for read in readers]
                energy = sum(gpu.millijoules for gpu in now)
                readings[step] = Reading(step, energy, now[0].sm_mhz)
    tokens = recipe.train.global_batch_tokens
    counted = list(readings.values())
    # Only the sparse kernels' throughput depends on the sparsity, and they need a GPU.
    by_sparsity = on_gpu and recipe.ffn.kernels != "dense"
    run_figures = figures(records, counted, tokens, checks_steady_state=by_sparsity, on_gpu=on_gpu)
    write_atomically(figures_path, json.dumps(run_figures._asdict()) + "\n")
    return run_figures


def _case(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    recipe = recipe_of(options, setting)
    if options.init_from:  # the model is that of the weights
        recipe = recipe_for(options.recipe, _overrides(options, setting), options.init_from)
    vocabulary, gradients = recipe.padded_vocab_size, recipe.runtime.weight_gradients
    sparse = recipe.ffn.kernels != "dense"
    union = recipe.ffn.format == "union"  # to TwELL, the order of tokens makes no difference
    in_order = sparse and union and recipe.runtime.token_order == "auto"
    target, precision = recipe.sparsity.target_nnz, recipe.runtime.precision
    optimizer = recipe.optimizer.name
    return {
        "recipe": recipe.name,
        "layers": recipe.model.num_hidden_layers,
        **({} if vocabulary == _USUAL_VOCABULARY else {"vocab_size": vocabulary}),
        "gpus": setting.gpus,
        "config": setting.config,
        "kernels": recipe.ffn.kernels,
        **({"format": recipe.ffn.format} if sparse and not union else {}),
        **({"token_order": "auto"} if in_order else {}),
        **({} if gradients == "autograd" else {"weight_gradients": gradients}),
        **({} if precision == "bf16" else {"precision": precision}),
        **({} if optimizer == "adamw" else {"optimizer": optimizer}),
        "global_batch_tokens": recipe.train.global_batch_tokens,
        "micro_batch_size": recipe.train.micro_batch_size,
        "l1_coefficient": recipe.sparsity.l1_coefficient,  # with a target, only its first value
        **({"target_nnz": target} if target else {}),
    }
