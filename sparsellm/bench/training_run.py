"""Whole training runs through `accelerate launch`: rate, memory, energy, scaling, kill and resume.

Every combination of GPUs, launch configuration and kernels is a run of its own that starts from the
same weights, whose sparsity has settled: a given checkpoint, or that of a settling run, dense. The
runs hold these weights by a tiny constant learning rate: a fresh optimizer at the recipe's own, or
its warm-up, would move what is to be measured. One GPU alone is launched by launch/single.yaml, and
is what each configuration's efficiency is measured against.

`train_figures` says how a run's records become figures, and what they are held against.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsellm.bench.energy import EnergyCounter
from sparsellm.bench.record import Measurement
from sparsellm.bench.train_figures import (
    MIN_STEADY,
    Figures,
    figures,
    largest_difference,
    measurements,
)
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.pretrained import find_checkpoint
from sparsellm.training.launched import Record, launch_config, train_command, watch

SINGLE = "single"  # the launch configuration of one GPU
KERNELS = ("dense", "sparse", "auto")  # in the order of the runs: dense is what others are held to
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

    @property
    def variant(self) -> str:
        """Kernels, and the format where it is not the usual one."""
        return self.kernels if self.format == "union" else f"{self.kernels}-{self.format}"

    def __str__(self) -> str:
        return f"{self.config} × {self.gpus}, {self.variant}"


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    recipe: str  # name or file
    overrides: list[str]  # of every run
    sides: list[Side]
    steps: int  # of each measured run
    folder: Path  # of all runs
    init_from: Path | None = None
    settle_steps: int = 0
    settle_overrides: tuple[str, ...] = ()  # of the settling run alone
    tokens_per_gpu: int | None = None  # a step; None: the recipe's global batch for any number
    energy: bool = False
    kill: bool = False
    forward: bool = False
    loader: bool = False

    def resolved(self, side: Side) -> Recipe:
        """What a measured run computes."""
        return load_recipe(self.recipe, self.run_overrides(side, "checked", self.folder))

    def run_overrides(self, side: Side, name: str, folder: Path) -> list[str]:
        """A measured run's: what the user gives overrides what is only off by default."""
        hold = HOLD if self.init_from or self.settle_steps else []
        wanted = [*QUIET, *hold, *self.overrides, f"ffn.kernels={side.kernels}"]
        if side.format != "union":
            wanted.append(f"ffn.format={side.format}")
        if self.tokens_per_gpu:
            wanted.append(f"train.global_batch_tokens={self.tokens_per_gpu * side.gpus}")
        wanted += [f"train.steps={self.steps}", "logging.every_steps=1"]
        return [*wanted, f"name={name}", f"logging.run_dir={folder}"]


def combinations(
    gpus: Sequence[int],
    configs: Sequence[str],
    kernels: Sequence[str],
    formats: Sequence[str] = ("union",),
) -> list[Side]:
    """All of them, what others are held against first; dense has no format."""
    return [
        Side(number, config, kind, name)
        for number in sorted(set(gpus))
        for config in (dict.fromkeys(configs) if number > 1 else [SINGLE])
        for kind in KERNELS
        if kind in kernels
        for name in (dict.fromkeys(formats) if kind != "dense" else ["union"])
    ]


def run(plan: Plan) -> Iterator[list[Measurement] | str]:
    """Measures run by run; what is yielded is final, sentences are for people.

    Raises:
        ValueError: the plan cannot be carried out here, or some of it failed.
    """
    check(plan)
    bench = TrainingRunBench(plan)
    if plan.settle_steps:
        yield bench.settle()
    failed = []
    for name, job in bench.jobs():
        try:
            yield job()
        except (ValueError, OSError, torch.OutOfMemoryError) as error:
            failed.append(name)
            yield f"failed: {name}: {error}"
    if failed:
        raise ValueError(f"the reasons are above: {len(failed)} failed ({'; '.join(failed)})")


def check(plan: Plan) -> None:
    """Refuses what cannot be, before anything is started.

    Raises:
        ValueError: says what, and what to do.
    """
    on_gpu = torch.cuda.is_available()
    most = max(side.gpus for side in plan.sides)
    if on_gpu and most > torch.cuda.device_count():
        raise ValueError(f"--gpus {most}: this machine has {torch.cuda.device_count()}")
    if not on_gpu and (plan.energy or plan.forward):
        raise ValueError("--energy and --forward need a CUDA device")
    if plan.steps < MIN_STEPS:
        raise ValueError(f"--steps {plan.steps}: at least {MIN_STEPS} are needed")
    if plan.forward and not (plan.init_from or plan.settle_steps):
        raise ValueError("--forward needs weights: give --init-from or --settle-steps")
    if plan.init_from:
        find_checkpoint(plan.init_from)  # raises here, not in the first launch
    for side in plan.sides:
        path = launch_config(side.config)
        if not on_gpu and "fsdp_config" in path.read_text(encoding="utf-8"):
            raise ValueError(f"--config {side.config}: accelerate shards over CUDA devices alone")
        plan.resolved(side).accumulation_steps(side.gpus)


class TrainingRunBench:
    """Carries a plan out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.on_gpu = torch.cuda.is_available()
        self.start = plan.init_from
        self.found: dict[Side, tuple[Figures, list[Record]]] = {}
        plan.folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="runs-", dir=plan.folder))
        most = max(side.gpus for side in plan.sides) if plan.energy else 0
        self.counters = [EnergyCounter(torch.device("cuda", index)) for index in range(most)]

    def jobs(self) -> Iterator[tuple[str, Callable[[], list[Measurement]]]]:
        """What there is to measure, by name."""
        for side in self.plan.sides:
            yield str(side), lambda side=side: self.measure(side)  # type: ignore[misc]
        if self.plan.kill:
            yield "--kill", self.kill
        if self.plan.loader:
            yield "--loader", self.loader
        if self.plan.forward:
            yield "--forward", self.forward

    def settle(self) -> str:
        """Trains the weights that all measured runs begin with, unless they are there already.

        Raises:
            ValueError: the launch fails.
        """
        plan, steps = self.plan, self.plan.settle_steps
        side = max(plan.sides, key=lambda side: side.gpus)._replace(kernels="dense", format="union")
        overrides = [*QUIET, f"optimizer.warmup_steps={steps // 10}", *plan.overrides]
        overrides += [*plan.settle_overrides, "ffn.kernels=dense", f"train.steps={steps}"]
        overrides += [f"checkpoint.every_steps={steps}", f"logging.run_dir={plan.folder}"]
        words = train_command(side.config, side.gpus, plan.recipe, overrides, plan.init_from)
        # Another command is another run; the same one is not done again.
        name = f"settle-{hashlib.sha256(repr(words).encode()).hexdigest()[:8]}"
        overrides.append(f"name={name}")
        path = load_recipe(plan.recipe, overrides).run_path
        self.start = checkpoint.latest(path / "checkpoints")
        if self.start is not None:
            return f"settled before: {self.start}"
        words = train_command(side.config, side.gpus, plan.recipe, overrides, plan.init_from)
        *_, records = watch(words, path)
        self.start = checkpoint.latest(path / "checkpoints")
        nnz = statistics.mean(records[-1]["sparsity"]["nnz_mean"])
        return f"settled: {nnz:.1f} non-zeros a token, loss {records[-1]['loss']:.3f}: {self.start}"

    def measure(self, side: Side) -> list[Measurement]:
        """One combination."""
        recipe = self.plan.resolved(side)
        run_path, command = self._run(side, "")
        counters, energy = self.counters[: side.gpus], {}
        for records in watch(command, run_path):
            if records and counters and records[-1]["step"] not in energy:
                energy[records[-1]["step"]] = sum(counter.read() for counter in counters)
        tokens = recipe.train.global_batch_tokens
        settles = side.kernels != "dense"
        found = figures(records, energy, tokens, settles=settles, on_gpu=self.on_gpu)
        self.found[side] = found, records
        dense = self._figures(side._replace(kernels="dense", format="union")) if settles else None
        alone = self._figures(side._replace(gpus=1, config=SINGLE)) if side.gpus > 1 else None
        return measurements(self._case(side), found, dense, alone)

    def kill(self) -> list[Measurement]:
        """The last combination that was measured once more, killed in the middle and resumed."""
        side = self._last()
        every = self.plan.steps // 2
        kill_at = min(every + 2, self.plan.steps - 1)
        run_path, command = self._run(side, "-killed", f"checkpoint.every_steps={every}")
        began = 0.0
        with closing(watch(command, run_path)) as watched:
            for before in watched:
                began = time.perf_counter()
                if before and before[-1]["step"] >= kill_at:
                    break
        lost = before[-1]
        seconds = None
        for records in watch(command, run_path):
            # A record's `seconds` count from the start of its process: it was made again.
            again = [r for r in records if r["step"] == lost["step"]]
            if seconds is None and again and again[0]["seconds"] != lost["seconds"]:
                seconds = time.perf_counter() - began
        if seconds is None:
            raise ValueError("the run had ended before it could be killed; give more --steps")
        case, unit = self._case(side), "relative, largest of all steps"
        difference = largest_difference(records, self.found[side][1])
        return [
            Measurement("train", case, "resume_difference", difference, unit),
            Measurement("train", case, "resume_seconds", seconds, "s, from kill to the same step"),
        ]

    def loader(self) -> list[Measurement]:
        """What the data loader of the last combination makes, beside what training takes."""
        from sparsellm.bench import loader_rate

        side = self._last()
        recipe, needed = self.plan.resolved(side), self.found[side][0].tokens_per_ms
        found = loader_rate.run(
            corpus=recipe.data.corpus,
            files=recipe.data.files,
            tokenizer=recipe.data.tokenizer,
            num_workers=recipe.data.num_workers,
            num_ranks=side.gpus,
            context_length=recipe.model.context_length,
            micro_batch_size=recipe.train.micro_batch_size,
            seconds=5.0,
        )
        made, unit = found[0].value / 1e3, "tokens/ms out of the loader"
        case = self._case(side)
        return [Measurement("train", case, "loader", made, unit, needed, made / needed)]

    def forward(self) -> list[Measurement]:
        """The settled model's forward on one GPU."""
        from sparsellm.bench import model_forward

        assert self.start is not None
        recipe = load_recipe(self.plan.recipe, self.plan.overrides)
        return model_forward.run(self.start, recipe, torch.device("cuda", 0), self.plan.energy)

    def _run(self, side: Side, suffix: str, *overrides: str) -> tuple[Path, list[str]]:
        """Folder and command of a measured run."""
        name = f"{side.config}-{side.gpus}-{side.variant}{suffix}"
        wanted = [*self.plan.run_overrides(side, name, self.folder), *overrides]
        command = train_command(side.config, side.gpus, self.plan.recipe, wanted, self.start)
        return self.folder / name, command

    def _figures(self, side: Side) -> Figures | None:
        return self.found[side][0] if side in self.found else None

    def _last(self) -> Side:
        if not self.found:
            raise ValueError("no combination was measured")
        return list(self.found)[-1]

    def _case(self, side: Side) -> dict[str, Any]:
        recipe = self.plan.resolved(side)
        return {
            "recipe": load_recipe(self.plan.recipe, self.plan.overrides).name,
            "layers": recipe.model.num_hidden_layers,
            "gpus": side.gpus,
            "config": side.config,
            "kernels": side.kernels,
            **({} if side.format == "union" else {"format": side.format}),
            **({"token_order": "auto"} if _in_order(recipe, side) else {}),
            "global_batch_tokens": recipe.train.global_batch_tokens,
            "micro_batch_size": recipe.train.micro_batch_size,
            "l1_coefficient": recipe.sparsity.l1_coefficient,
        }


def _in_order(recipe: Recipe, side: Side) -> bool:
    return side.kernels != "dense" and recipe.runtime.token_order == "auto"
