"""Reads a sweep's folder: its runs by group, and the results of each group."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import BaseModel, ConfigDict

from sparsellm.recipe.strict import read_model
from sparsellm.report.collect import RunData, read_runs, without_records
from sparsellm.runs.files import SWEEP_FILE, read_json_lines

BENCH_FILE = "bench.jsonl"  # `sparsellm bench forward RUN… --record <sweep>/bench.jsonl`
_LAST_SHARE = 0.1  # share of a run's steps that is averaged: non-zeros of one step are noisy


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, and the entry of summary.json about them."""

    runs: list[RunData]
    left_out: list[RunData]  # those that have ended early, if others have not
    forward_ratios: dict[str, list[float]]  # dense to sparse, of `bench forward`, by metric
    group: str  # its name
    seeds: list[int]
    steps: list[int]
    tokens: list[int]
    l1_coefficient: float  # λ at the end of the run, also if a controller moved it
    nnz: float  # non-zeros per token over the last tenth of the steps, mean over layers and seeds
    zeros: float  # share of the activations that are zero, likewise
    dead_fraction: float  # share of dead neurons at the end
    held_out_losses: list[float]  # the last one of each seed, nats per token
    tokens_per_second: float  # median over the second half of the records, mean over seeds
    forward_ratio: float | None  # mean ratio of the forward's throughputs, if it was measured
    mean_scores: list[float]  # the newest mean task score of each seed that has one

    @property
    def loss_by_seed(self) -> dict[int, float]:
        """Of each seed the last validation loss, nats per token, if it has one."""
        return _last_losses(self.runs)

    def summary(self) -> dict[str, Any]:
        """The entry of summary.json."""
        names = [
            f.name for f in fields(self) if f.name not in ("runs", "left_out", "forward_ratios")
        ]
        return {name: getattr(self, name) for name in names}


def _last_losses(runs: list[RunData]) -> dict[int, float]:
    return {run.recipe.seed: run.validation[-1]["loss"] for run in runs if run.validation}


def _group(name: str, members: list[RunData], bench: list[dict[str, Any]]) -> Group:
    """A group of these runs; ``bench`` has records about the runs of all groups.

    Numbers of the last step and of an earlier one have no mean: if some runs are whole, the others
    are left out.
    """
    whole = [run for run in members if run.is_whole]
    runs, left_out = whole or members, [run for run in members if whole and not run.is_whole]
    of_run = {  # of a run that was measured again, the last
        (line["metric"], line["case"].get("run")): line["ratio"]
        for line in bench
        if line["bench"] == "model_forward"
    }
    ratios = {
        metric: [of_run[key] for run in runs if (key := (metric, run.path.name)) in of_run]
        for metric in ("tokens_per_ms", "mJ_per_token")
    }
    throughputs = [
        [r["tokens_per_second"] for r in run.train[len(run.train) // 2 :]] for run in runs
    ]
    nnz, ends = fmean(map(last_nnz, runs)), [run.train[-1] for run in runs]
    return Group(
        runs,
        left_out,
        ratios,
        group=name,
        seeds=[run.recipe.seed for run in runs],
        steps=[run.end["step"] for run in runs],
        tokens=[run.end["tokens"] for run in runs],
        l1_coefficient=fmean(end["l1_coefficient"] for end in ends),
        nnz=nnz,
        zeros=1 - nnz / runs[0].recipe.model.intermediate_size,
        dead_fraction=fmean(fmean(end["sparsity"]["dead_fraction"]) for end in ends),
        held_out_losses=list(_last_losses(runs).values()),
        tokens_per_second=fmean(map(median, throughputs)),
        forward_ratio=fmean(ratios["tokens_per_ms"]) if ratios["tokens_per_ms"] else None,
        mean_scores=[score for run in runs if (score := mean_score(run)) is not None],
    )


@dataclass(frozen=True)
class SweepData:
    """A sweep, as far as it has run."""

    name: str
    description: str
    groups: list[Group]

    @property
    def runs(self) -> list[RunData]:
        """The runs of all groups, also those that are left out of the groups' numbers."""
        return [run for g in self.groups for run in (*g.runs, *g.left_out)]

    @property
    def measured_on(self) -> str:
        """Devices and commits of the runs' processes, as figures state them."""
        sessions = [s for run in self.runs for s in run.sessions]
        devices = dict.fromkeys(f"{s['ranks']}× {s['device']}" for s in sessions)
        commits = dict.fromkeys(s["commit"] for s in sessions if s["commit"])
        parts = [", ".join(devices), "commit " + ", ".join(commits) if commits else ""]
        return " · ".join(part for part in parts if part)

    @property
    def dense_relu(self) -> Group | None:
        """Gated ReLU without L1, the baseline of sparse runs.

        None where several groups are such, as of two sizes: none of them is the baseline of all.
        """
        return self._only(
            lambda r: r.ffn.activation == "relu" and r.ffn.gated and r.sparsity.l1_coefficient == 0
        )

    @property
    def silu(self) -> Group | None:
        """SiLU, in the same way."""
        return self._only(lambda r: r.ffn.activation == "silu")

    def families(self) -> list[tuple[int, list[Group]]]:
        """Groups that differ only in a constant λ above 0, each after the number of the first."""
        by_key: dict[str, tuple[int, list[Group]]] = {}
        for index, g in enumerate(self.groups):
            first_recipe = g.runs[0].recipe
            recipe = first_recipe.model_dump(mode="json", exclude={"name", "seed", "description"})
            moved = recipe["sparsity"].pop("l1_coefficient")
            is_constant = (
                first_recipe.activation.exact_zeros and not first_recipe.sparsity.target_nnz
            )
            key = json.dumps(recipe) if is_constant and moved else g.group
            by_key.setdefault(key, (index, []))[1].append(g)
        return list(by_key.values())

    def _only(self, predicate: Any) -> Group | None:
        chosen = [g for g in self.groups if predicate(g.runs[0].recipe)]
        return chosen[0] if len(chosen) == 1 else None


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
    content = read_model(path, SweepFile, "run the sweep again")
    bench = _lines(folder / BENCH_FILE)
    started = [r for r in content["runs"] if without_records(folder / r["name"]) is None]
    if not started:
        raise FileNotFoundError(f"{folder}: none of its runs has a record yet")
    groups: dict[str, list[RunData]] = {}
    for run, data in zip(started, read_runs([folder / r["name"] for r in started]), strict=True):
        groups.setdefault(run["group"], []).append(data)
    sweep_groups = [_group(name, members, bench) for name, members in groups.items()]
    return SweepData(content["name"], content["description"], sweep_groups)


def mean_score(run: RunData) -> float | None:
    """The mean task score of the newest evaluation, if there is one."""
    newest = run.evaluations[-1] if run.evaluations else None
    return newest.mean.value if newest and newest.mean else None


def last_nnz(run: RunData) -> float:
    """Non-zeros per token over the last tenth of a run's steps, mean over layers."""
    end = run.train[-1]["step"] * (1 - _LAST_SHARE)
    last_records = [r for r in run.train if r["step"] > end] or run.train[-1:]
    return fmean(fmean(r["sparsity"]["nnz_mean"]) for r in last_records)


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


class SweepFile(BaseModel):
    """What `sparsellm sweep` writes of its runs."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str
    runs: list[_SweepRun]
