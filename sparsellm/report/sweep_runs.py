"""Reads a sweep's folder: its runs by group, and the results of each group."""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sparsellm.report.collect import RunData, read_runs, without_records
from sparsellm.runs.files import read_json_lines
from sparsellm.strict import read_model

SWEEP_FILE = "sweep.json"
BENCH_FILE = "bench.jsonl"  # `sparsellm bench forward RUN… --record <sweep>/bench.jsonl`
_LAST_SHARE = 0.1  # share of a run's steps that is averaged: non-zeros of one step are noisy


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    runs: list[RunData]
    bench: list[dict[str, Any]] = field(default_factory=list)  # benchmark records about these runs

    @property
    def recipe(self) -> Any:
        """The recipe of the first run; the others' differ only in the seed."""
        return self.runs[0].recipe

    @property
    def losses(self) -> list[float]:
        """The last held-out loss of each seed, nats per token."""
        return [run.validation[-1]["loss"] for run in self.runs if run.validation]

    @property
    def nnz(self) -> float:
        """Non-zeros per token over the last tenth of the steps, mean over layers and seeds."""
        return statistics.fmean(last_nnz(run) for run in self.runs)

    @property
    def zeros(self) -> float:
        """Share of the activations that are zero, likewise."""
        return float(1 - self.nnz / self.recipe.model.intermediate_size)

    @property
    def dead(self) -> float:
        """Share of dead neurons at the end."""
        return statistics.fmean(
            statistics.fmean(run.train[-1]["sparsity"]["dead_fraction"]) for run in self.runs
        )

    @property
    def l1_coefficient(self) -> float:
        """λ at the end of the run, also if a controller moved it."""
        return statistics.fmean(run.train[-1]["l1_coefficient"] for run in self.runs)

    @property
    def tokens_per_second(self) -> float:
        """Median over the second half of the records, mean over seeds."""
        halves = [run.train[len(run.train) // 2 :] for run in self.runs]
        return statistics.fmean(
            statistics.median(record["tokens_per_second"] for record in half) for half in halves
        )

    @property
    def scores(self) -> list[float]:
        """The newest mean task score of each seed that has one."""
        return [score for run in self.runs if (score := mean_score(run)) is not None]

    def forward_ratios(self, metric: str) -> list[float]:
        """Of `bench forward` on the group's checkpoints, dense to sparse."""
        of = ("model_forward", metric)
        return [r["ratio"] for r in self.bench if (r["bench"], r["metric"]) == of]

    @property
    def forward_ratio(self) -> float | None:
        """Mean ratio of the forward's rates, if it was measured."""
        found = self.forward_ratios("tokens_per_ms")
        return statistics.fmean(found) if found else None


@dataclass(frozen=True)
class SweepData:
    """A sweep, as far as it has run."""

    name: str
    description: str
    groups: list[Group]

    @property
    def taken_on(self) -> str:
        """Devices and commits of the runs' processes, as figures state them."""
        sessions = [s for g in self.groups for run in g.runs for s in run.sessions]
        devices = dict.fromkeys(f"{s['ranks']}× {s['device']}" for s in sessions)
        commits = dict.fromkeys(s["commit"] for s in sessions if s["commit"])
        parts = [", ".join(devices), "commit " + ", ".join(commits) if commits else ""]
        return " · ".join(part for part in parts if part)

    @property
    def dense_relu(self) -> float | None:
        """Mean held-out loss of gated ReLU without L1, the baseline of sparse runs."""
        return self._mean_loss(
            lambda r: r.ffn.activation == "relu" and r.ffn.gated and r.sparsity.l1_coefficient == 0
        )

    @property
    def silu(self) -> float | None:
        """Mean held-out loss of SiLU."""
        return self._mean_loss(lambda r: r.ffn.activation == "silu")

    def families(self) -> list[tuple[int, list[Group]]]:
        """Groups that differ in a constant λ above 0 alone, with the number of the first."""
        found: dict[str, tuple[int, list[Group]]] = {}
        for index, g in enumerate(self.groups):
            recipe = g.recipe.model_dump(mode="json", exclude={"name", "seed", "description"})
            moved = recipe["sparsity"].pop("l1_coefficient")
            is_constant = g.recipe.activation.exact_zeros and not g.recipe.sparsity.target_nnz
            key = json.dumps(recipe) if is_constant and moved else g.name
            found.setdefault(key, (index, []))[1].append(g)
        return list(found.values())

    def _mean_loss(self, wanted: Any) -> float | None:
        losses = [loss for g in self.groups if wanted(g.recipe) for loss in g.losses]
        return statistics.fmean(losses) if losses else None


def read_sweep(folder: Path) -> SweepData:
    """Reads every run that has begun.

    Raises:
        FileNotFoundError: the folder is not a sweep, or none of its runs has begun.
        ValueError: a file is damaged.
    """
    path = folder / SWEEP_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a sweep: it has no {SWEEP_FILE}; give a folder that "
            "`sparsellm sweep` wrote, such as runs/quality"
        )
    content = read_model(path, _SweepFile, "run the sweep again")
    bench_lines = _lines(folder / BENCH_FILE)
    begun = [r for r in content["runs"] if without_records(folder / r["name"]) is None]
    if not begun:
        raise FileNotFoundError(f"{folder}: none of its runs has a record yet")
    groups: dict[str, list[RunData]] = {}
    for run, data in zip(begun, read_runs([folder / r["name"] for r in begun]), strict=True):
        groups.setdefault(run["group"], []).append(data)
    found = []
    for name, members in groups.items():
        own = {run.path.name for run in members}
        found.append(Group(name, members, [r for r in bench_lines if r["case"].get("run") in own]))
    return SweepData(content["name"], content["description"], found)


def mean_score(run: RunData) -> float | None:
    """The mean task score of the newest evaluation, if there is one."""
    newest = run.evaluations[-1] if run.evaluations else None
    return newest.mean.value if newest and newest.mean else None


def last_nnz(run: RunData) -> float:
    """Non-zeros per token over the last tenth of a run's steps, mean over layers."""
    end = run.train[-1]["step"] * (1 - _LAST_SHARE)
    late = [r for r in run.train if r["step"] > end] or run.train[-1:]
    return statistics.fmean(statistics.fmean(r["sparsity"]["nnz_mean"]) for r in late)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return read_json_lines(path, _BenchLine, "correct that line, or run the sweep again")


class _BenchLine(BaseModel):
    model_config = ConfigDict(extra="allow")

    bench: str
    case: dict[str, Any]
    metric: str


class _SweepRun(BaseModel):
    name: str
    group: str


class _SweepFile(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str
    runs: list[_SweepRun]
