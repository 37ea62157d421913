"""Turns the records of a training run into the figures and ratios of `bench train`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsellm.bench.record import Measurement
from sparsellm.ffn.capacity import SHRUNK_STEPS
from sparsellm.training.launched import Record

MIN_STEADY = 3
MAX_DRIFT = 0.2  # relative change of non-zeros per token between the halves of the measured part


@dataclass(frozen=True)
class Figures:
    """Figures of one run."""

    tokens_per_ms: float  # all GPUs
    mfu: float | None  # None: the GPU's peak is unknown
    memory_gib: float | None  # peak of rank 0's GPU; None: no GPU, or memory has not settled
    mj_per_token: float | None  # all GPUs; None: not requested
    sparse_layers: int
    union_mean: float  # neurons that fire for any of 64 tokens, mean over layers
    nnz: float  # neurons per token, mean over layers
    loss: float  # nats per token, last step


def figures(
    records: Sequence[Record],
    energy: dict[int, int],
    tokens_a_step: int,
    *,
    settles: bool = True,
    on_gpu: bool = True,
) -> Figures:
    """The figures of a run's second half, when everything is compiled and warm.

    Rates are medians over the steps whose layers took the same paths as in the step before. Memory
    is the last step's.

    Args:
        records: the records of every step.
        energy: step → mJ on the counters when that step was done; steps may be missing.
        tokens_a_step: tokens per step of all ranks.
        settles: whether to refuse a run whose sparsity still changes.
        on_gpu: whether the run used GPUs; if not, memory (of the process) is not reported.

    Raises:
        ValueError: there are too few steady steps, or the non-zeros drift.
    """
    half = len(records) // 2
    part = records[half:]
    steady = [
        after
        for before, after in itertools.pairwise(records[max(half - 1, 0) :])
        if before["kernels"]["sparse"] == after["kernels"]["sparse"]
    ]
    if len(steady) < MIN_STEADY:
        raise ValueError(
            f"only {len(steady)} of the last {len(part)} steps took the same paths as the step "
            "before: sparsity has not settled; increase --steps or --settle-steps"
        )
    nnz = [statistics.mean(record["sparsity"]["nnz_mean"]) for record in part]
    first, last = (statistics.mean(h) for h in (nnz[: len(nnz) // 2], nnz[len(nnz) // 2 :]))
    if settles and abs(last - first) > MAX_DRIFT * max(first, 1e-9):
        raise ValueError(
            f"sparsity has not settled: {first:.1f} → {last:.1f} non-zeros per token within the "
            "measured steps; increase --settle-steps, or give --init-from"
        )
    end = records[-1]
    sparse_layers = sum(end["kernels"]["sparse"])
    shrunk = not sparse_layers or len(records) > SHRUNK_STEPS
    mfu = [record["mfu"] for record in steady]
    counted = sorted(step for step in energy if step >= part[0]["step"] - 1)
    tokens = (counted[-1] - counted[0]) * tokens_a_step if counted else 0
    return Figures(
        tokens_per_ms=statistics.median(r["tokens_per_second"] for r in steady) / 1e3,
        mfu=None if None in mfu else statistics.median(mfu),
        memory_gib=end["memory_gib"] if on_gpu and shrunk else None,
        mj_per_token=(energy[counted[-1]] - energy[counted[0]]) / tokens if tokens else None,
        sparse_layers=sparse_layers,
        union_mean=statistics.mean(end["kernels"]["union_mean"]),
        nnz=last,
        loss=end["loss"],
    )


def measurements(
    case: dict[str, Any], found: Figures, dense: Figures | None, alone: Figures | None
) -> list[Measurement]:
    """The measurements of a run; ratios above 1 are better.

    Args:
        case: the run's keys, including ``gpus``.
        found: the run's figures.
        dense: figures of the dense run on the same GPUs and configuration: the baseline of rate,
            memory and energy.
        alone: figures of one GPU with the same kernels: the baseline of the rate per GPU, whose
            ratio is the scaling efficiency.
    """
    rows: list[Measurement] = []

    def of(metric: str, unit: str, value: float | None, baseline: float | None = None) -> None:
        if value is None:
            return
        ratio = None
        if baseline:
            more_is_better = metric.startswith("tokens_per_ms")
            ratio = value / baseline if more_is_better else baseline / value
        rows.append(Measurement("train", case, metric, value, unit, baseline, ratio))

    rate, gpus = found.tokens_per_ms, case["gpus"]
    of("tokens_per_ms", "tokens/ms", rate, dense.tokens_per_ms if dense else None)
    of("tokens_per_ms_a_gpu", "tokens/ms", rate / gpus, alone.tokens_per_ms if alone else None)
    of("mfu", "of the bf16 peak, dense-equivalent", found.mfu)
    of("memory_GiB", "GiB, peak of rank 0", found.memory_gib, dense.memory_gib if dense else None)
    of("mJ_per_token", "mJ", found.mj_per_token, dense.mj_per_token if dense else None)
    of("sparse_layers", "layers", found.sparse_layers)
    of("union_mean", "neurons of 64 tokens, mean over layers", found.union_mean)
    of("nnz", "neurons per token, mean over layers", found.nnz)
    of("loss", "nats per token", found.loss)
    return rows


def row(found: Sequence[Measurement]) -> str:
    """The printed line of one case's measurements."""
    case = " ".join(f"{key}={value}" for key, value in found[0].case.items())
    parts = []
    for m in found:
        ratio = "" if m.ratio is None else f" ({m.ratio:.2f}× of {m.baseline:,.4g})"
        parts.append(f"{m.metric} {m.value:,.4g}{ratio}")
    return f"{found[0].bench} {case}: {', '.join(parts)}"
