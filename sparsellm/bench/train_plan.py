"""The plan of `bench train`: combinations of GPUs, launch configuration and kernels.

A single GPU is launched by launch/single.yaml, and is the baseline of each configuration's scaling
efficiency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from sparsellm.bench.train_figures import MIN_STEADY
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.runs.pretrained import find_checkpoint
from sparsellm.training.launched import launch_config

SINGLE = "single"  # the launch configuration of one GPU
KERNELS = ("dense", "sparse", "auto")  # in the order of the runs: dense, the baseline, comes first
MIN_STEPS = 2 * MIN_STEADY
QUIET = ["checkpoint.every_steps=0", "validation.every_steps=0", "evaluation.every_steps=0"]
QUIET += ["logging.wandb=disabled"]
HOLD = ["optimizer.learning_rate=1e-6", "optimizer.warmup_steps=0", "optimizer.min_lr_ratio=1"]


class Side(NamedTuple):
    """One combination."""

    gpus: int
    config: str  # a file of launch/
    kernels: str
    format: str = "union"  # of the sparse kernels
    token_order: str | None = None  # of the sparse kernels; None: the recipe's
    micro_batch_size: int | None = None  # None: the recipe's

    @property
    def variant(self) -> str:
        """The kernels, and all other settings that are not the defaults."""
        parts = [self.kernels]
        parts += [self.format] if self.format != "union" else []
        parts += [f"order-{self.token_order}"] if self.token_order else []
        parts += [f"batch-{self.micro_batch_size}"] if self.micro_batch_size else []
        return "-".join(parts)

    @property
    def baseline(self) -> Side:
        """The dense run that is its baseline."""
        return self._replace(kernels="dense", format="union", token_order=None)

    def __str__(self) -> str:
        return f"{self.config} × {self.gpus}, {self.variant}"


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    recipe: str  # bundled name or file
    overrides: list[str]  # of every run
    sides: list[Side]
    steps: int  # of each measured run
    folder: Path  # of all runs
    init_from: Path | None = None
    settle_steps: int = 0
    settle_overrides: tuple[str, ...] = ()  # of the settling run only
    settle_gpus: int | None = None  # None: as many as the largest measured run
    settle_config: str = "ddp8"  # a file of launch/, for a settling run on several GPUs
    tokens_per_gpu: int | None = None  # per step; None: the recipe's global batch
    energy: bool = False
    parallel: bool = False  # runs on one GPU at once, one on each
    seconds: float | None = None  # no run is started later than this

    def resolved(self, side: Side) -> Recipe:
        """The recipe of a measured run."""
        return load_recipe(self.recipe, self.run_overrides(side, "checked", self.folder))

    def run_overrides(self, side: Side, name: str, folder: Path) -> list[str]:
        """Overrides of a measured run: the plan's win over the user's, these over the defaults."""
        hold = HOLD if self.init_from or self.settle_steps else []
        wanted = [*QUIET, *hold, *self.overrides, f"ffn.kernels={side.kernels}"]
        if side.format != "union":
            wanted.append(f"ffn.format={side.format}")
        if side.token_order:
            wanted.append(f"runtime.token_order={side.token_order}")
        if side.micro_batch_size:
            wanted.append(f"train.micro_batch_size={side.micro_batch_size}")
        if self.tokens_per_gpu:
            wanted.append(f"train.global_batch_tokens={self.tokens_per_gpu * side.gpus}")
        wanted += [f"train.steps={self.steps}", "logging.every_steps=1"]
        return [*wanted, f"name={name}", f"logging.run_dir={folder}"]


def combinations(
    gpus: Sequence[int],
    configs: Sequence[str],
    kernels: Sequence[str],
    formats: Sequence[str] = ("union",),
    *,
    token_orders: Sequence[str | None] = (None,),
    micro_batch_sizes: Sequence[int | None] = (None,),
) -> list[Side]:
    """All combinations, baselines first.

    Dense ones have no format and no token order; TwELL has no order, since it makes no difference.
    """
    return [
        Side(number, config, kind, name, order, size)
        for number in sorted(set(gpus))
        for config in (dict.fromkeys(configs) if number > 1 else [SINGLE])
        for kind in KERNELS
        if kind in kernels
        for name in (dict.fromkeys(formats) if kind != "dense" else ["union"])
        for order in (
            dict.fromkeys(token_orders) if kind != "dense" and name != "twell" else [None]
        )
        for size in dict.fromkeys(micro_batch_sizes)
    ]


def check(plan: Plan) -> None:
    """Refuses an impossible plan before anything is started.

    Raises:
        ValueError: the plan is impossible; the message says why and what to do.
    """
    on_gpu = torch.cuda.is_available()
    most = max(side.gpus for side in plan.sides)
    most = max(most, plan.settle_gpus or 1)
    if on_gpu and most > torch.cuda.device_count():
        raise ValueError(f"--gpus {most}: this machine has {torch.cuda.device_count()}")
    if not on_gpu and plan.energy:
        raise ValueError("--energy needs a CUDA device")
    if plan.steps < MIN_STEPS:
        raise ValueError(f"--steps {plan.steps}: at least {MIN_STEPS} are needed")
    if plan.init_from:
        find_checkpoint(plan.init_from)  # raises here, not in the first launch
    launch_config(plan.settle_config)
    for side in plan.sides:
        path = launch_config(side.config)
        if not on_gpu and "fsdp_config" in path.read_text(encoding="utf-8"):
            raise ValueError(f"--config {side.config}: accelerate shards over CUDA devices only")
        recipe = plan.resolved(side)
        recipe.accumulation_steps(side.gpus)
        if recipe.train.micro_batch_size == "auto":
            raise ValueError(
                f"train.micro_batch_size of {recipe.name} is auto, which grows while a run is "
                "measured: give sizes, such as --micro-batch-size 4 8"
            )
