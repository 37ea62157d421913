"""Whole training runs through `accelerate launch`: rate, memory, energy, scaling.

Every combination of GPUs, launch configuration and kernels is a separate run. All start from the
same weights, whose sparsity has settled: a given checkpoint, or that of a dense settling run. A
tiny constant learning rate keeps these weights: with a fresh optimizer at the recipe's learning
rate, or during its warm-up, the sparsity would change. Runs on one GPU can be measured in parallel.

Results are kept in the folder, so the same command resumes where it was interrupted.

`train_figures` turns a run's records into figures and compares them with their baselines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsellm.bench.energy import EnergyCounter
from sparsellm.bench.record import Measurement
from sparsellm.bench.train_figures import (
    Figures,
    figures,
    measurements,
)
from sparsellm.bench.train_plan import QUIET, SINGLE, Plan, Side, check
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.files import write_atomically
from sparsellm.runs.session import commit
from sparsellm.training.launched import (
    Record,
    at_once,
    train_command,
    train_records,
    visible_gpus,
    watch,
)

_USUAL_VOCABULARY = 50_304  # GPT-2's, padded


def run(plan: Plan) -> Iterator[list[Measurement] | str]:
    """Measures run by run; each yielded result is final, and strings are messages to print.

    Raises:
        ValueError: the plan cannot be carried out here, or some of it failed.
    """
    check(plan)
    bench = TrainingRunBench(plan)
    if plan.settle_steps:
        yield bench.settle()
    failed = []
    with closing(bench.jobs()) as jobs:
        for name, job in jobs:
            try:
                yield job()
            except (ValueError, OSError, torch.OutOfMemoryError) as error:
                failed.append(name)
                yield f"failed: {name}: {error}"
    if failed:
        raise ValueError(f"the reasons are above: {len(failed)} failed ({'; '.join(failed)})")


class TrainingRunBench:
    """Carries out a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.on_gpu = torch.cuda.is_available()
        self.start = plan.init_from
        self.found: dict[Side, tuple[Figures, list[Record]]] = {}
        self.began = time.monotonic()
        plan.folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="runs-", dir=plan.folder))
        self.gpus = visible_gpus(torch.cuda.device_count())
        self.counters = []
        if plan.energy:
            devices = (torch.device("cuda", index) for index in range(len(self.gpus)))
            self.counters = [EnergyCounter(device) for device in devices]

    def jobs(self) -> Generator[tuple[str, Callable[[], list[Measurement]]], None, None]:
        """The measurements to make, by name; closing the generator ends the running ones."""
        alone = [side for side in self.plan.sides if self.plan.parallel and side.gpus == 1]
        with at_once(max(len(self.gpus), 1)) as submit:
            futures = {side: submit(partial(self.measure, side)) for side in alone}
            for side, future in futures.items():
                yield str(side), lambda side=side, future=future: self.held(side, future.result())  # type: ignore[misc]
        for side in self.plan.sides:
            if side not in futures:
                yield str(side), lambda side=side: self.held(side, self.measure(side, 0))  # type: ignore[misc]

    def settle(self) -> str:
        """Trains the weights that all measured runs start from, unless they exist already.

        Raises:
            ValueError: the launch fails.
        """
        plan, steps = self.plan, self.plan.settle_steps
        side = max(plan.sides, key=lambda side: side.gpus)
        gpus, config = side.gpus, side.config
        if plan.settle_gpus:
            gpus, config = plan.settle_gpus, plan.settle_config if plan.settle_gpus > 1 else SINGLE
        overrides = [*QUIET, f"optimizer.warmup_steps={steps // 10}", "ffn.kernels=dense"]
        overrides += [*plan.overrides, *plan.settle_overrides, f"train.steps={steps}"]
        overrides += [f"checkpoint.every_steps={steps}", f"logging.run_dir={plan.folder}"]
        words = train_command(config, gpus, plan.recipe, overrides, plan.init_from)
        # A different command is a different run; the same one is not repeated.
        which = hashlib.sha256(repr(words).encode()).hexdigest()[:8]
        name = f"settled-{load_recipe(plan.recipe, plan.overrides).name}-{which}"
        overrides.append(f"name={name}")
        path = load_recipe(plan.recipe, overrides).run_path
        self.start = checkpoint.latest(path / "checkpoints")
        if self.start is not None:
            return f"settled before: {self.start}"
        words = train_command(config, gpus, plan.recipe, overrides, plan.init_from)
        *_, records = watch(words, path)
        self.start = checkpoint.latest(path / "checkpoints")
        nnz = statistics.mean(records[-1]["sparsity"]["nnz_mean"])
        return (
            f"settled: {nnz:.1f} non-zeros per token, loss {records[-1]['loss']:.3f}: {self.start}"
        )

    def measure(self, side: Side, gpu: int) -> tuple[Figures, list[Record]]:
        """Measures one combination on the GPUs from this number on, or returns its kept figures.

        Raises:
            ValueError: the launch fails, sparsity has not settled, or the time limit has passed.
        """
        plan, recipe = self.plan, self.plan.resolved(side)
        wanted = plan.run_overrides(side, "", Path())
        key = repr((plan.recipe, side, wanted, str(self.start), plan.energy, commit()))
        kept = plan.folder / f"measured-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"
        if kept.is_file():
            before = json.loads(kept.read_text(encoding="utf-8"))
            with contextlib.suppress(FileNotFoundError):  # its run was deleted
                return Figures(**before["figures"]), train_records(Path(before["run_path"]))
        if plan.seconds is not None and time.monotonic() - self.began > plan.seconds:
            raise ValueError("not started: the time limit has passed (--seconds)")
        run_path, command = self._run(side, "")
        counters, energy = self.counters[gpu : gpu + side.gpus], {}
        for records in watch(command, run_path, self.gpus[gpu : gpu + side.gpus]):
            if records and counters and records[-1]["step"] not in energy:
                energy[records[-1]["step"]] = sum(counter.read() for counter in counters)
        tokens = recipe.train.global_batch_tokens
        settles = side.kernels != "dense"
        found = figures(records, energy, tokens, settles=settles, on_gpu=self.on_gpu)
        content = {"figures": asdict(found), "run_path": str(run_path)}
        write_atomically(kept, json.dumps(content) + "\n")
        return found, records

    def held(self, side: Side, measured: tuple[Figures, list[Record]]) -> list[Measurement]:
        """The measurements of a combination, relative to its baselines, which came before."""
        self.found[side] = measured
        dense = self._figures(side.baseline) if side.kernels != "dense" else None
        alone = self._figures(side._replace(gpus=1, config=SINGLE)) if side.gpus > 1 else None
        return measurements(self._case(side), measured[0], dense, alone)

    def _run(self, side: Side, suffix: str, *overrides: str) -> tuple[Path, list[str]]:
        """The folder and command of a measured run."""
        name = f"{side.config}-{side.gpus}-{side.variant}{suffix}"
        wanted = [*self.plan.run_overrides(side, name, self.folder), *overrides]
        command = train_command(side.config, side.gpus, self.plan.recipe, wanted, self.start)
        return self.folder / name, command

    def _figures(self, side: Side) -> Figures | None:
        return self.found[side][0] if side in self.found else None

    def _case(self, side: Side) -> dict[str, Any]:
        recipe = self.plan.resolved(side)
        vocabulary, gradients = recipe.padded_vocab_size, recipe.runtime.weight_gradients
        return {
            "recipe": load_recipe(self.plan.recipe, self.plan.overrides).name,
            "layers": recipe.model.num_hidden_layers,
            **({} if vocabulary == _USUAL_VOCABULARY else {"vocab_size": vocabulary}),
            "gpus": side.gpus,
            "config": side.config,
            "kernels": side.kernels,
            **({} if side.format == "union" else {"format": side.format}),
            **({"token_order": "auto"} if _in_order(recipe, side) else {}),
            **({} if gradients == "autograd" else {"weight_gradients": gradients}),
            "global_batch_tokens": recipe.train.global_batch_tokens,
            "micro_batch_size": recipe.train.micro_batch_size,
            "l1_coefficient": recipe.sparsity.l1_coefficient,  # with a target, only its first value
            **({"target_nnz": target} if (target := recipe.sparsity.target_nnz) else {}),
        }


def _in_order(recipe: Recipe, side: Side) -> bool:
    sparse = side.kernels != "dense" and side.format != "twell"  # as in `train_plan.combinations`
    return sparse and recipe.runtime.token_order == "auto"
