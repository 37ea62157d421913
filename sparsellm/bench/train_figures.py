"""Turns the records of a training run into the figures and ratios of `bench train`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsellm.bench.record import Measurement
from sparsellm.ffn.capacity import SHRUNK_STEPS
from sparsellm.processes.launched import Record

MIN_STEADY = 3
MAX_DRIFT = 0.2  # relative change of non-zeros per token between the halves of the measured part


class Reading(NamedTuple):
    """What NVML counted when a step was done."""

    step: int
    millijoules: int  # of all GPUs
    sm_mhz: int  # of the first GPU


class Figures(NamedTuple):
    """Figures of one run."""

    tokens_per_ms: float  # all GPUs
    p10: float  # of tokens_per_ms over the steps
    p90: float
    mfu: float | None  # None: the GPU's peak is unknown
    memory_gib: float | None  # peak of rank 0's GPU; None: no GPU, or memory has not settled
    mj_per_token: float | None  # all GPUs; None: NVML does not count energy
    sm_mhz: float | None  # likewise
    sparse_layers: int
    union_mean: float  # neurons that fire for any of 64 tokens, mean over layers
    nnz: float  # neurons per token, mean over layers
    loss: float  # nats per token, last step

    @property
    def sustained(self) -> dict[str, float]:
        """How the rate was sustained, for its record; watts are those of all GPUs."""
        found = {"p10": self.p10, "p90": self.p90}
        if self.mj_per_token is not None and self.sm_mhz is not None:
            found |= {"watts": self.mj_per_token * self.tokens_per_ms, "sm_mhz": self.sm_mhz}
        return found


def figures(
    records: Sequence[Record],
    readings: Sequence[Reading],
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
        readings: of NVML; steps may be missing.
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
            "before: sparsity has not settled; increase --steps, or train longer before and give "
            "--init-from"
        )
    nnz = [statistics.mean(record["sparsity"]["nnz_mean"]) for record in part]
    first, last = (statistics.mean(h) for h in (nnz[: len(nnz) // 2], nnz[len(nnz) // 2 :]))
    if settles and abs(last - first) > MAX_DRIFT * max(first, 1e-9):
        raise ValueError(
            f"sparsity has not settled: {first:.1f} → {last:.1f} non-zeros per token within the "
            "measured steps; train longer before, and give --init-from"
        )
    end = records[-1]
    sparse_layers = sum(end["kernels"]["sparse"])
    shrunk = not sparse_layers or len(records) > SHRUNK_STEPS
    rates = np.percentile([record["tokens_per_second"] for record in steady], [50, 10, 90]) / 1e3
    rate, p10, p90 = map(float, rates)
    mfu = [record["mfu"] for record in steady]
    counted = [reading for reading in readings if reading.step >= part[0]["step"] - 1]
    tokens = (counted[-1].step - counted[0].step) * tokens_a_step if counted else 0
    used = counted[-1].millijoules - counted[0].millijoules if counted else 0
    return Figures(
        tokens_per_ms=rate,
        p10=p10,
        p90=p90,
        mfu=None if None in mfu else statistics.median(mfu),
        memory_gib=end["memory_gib"] if on_gpu and shrunk else None,
        mj_per_token=used / tokens if tokens else None,
        sm_mhz=statistics.median(r.sm_mhz for r in counted) if counted else None,
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
    rate, gpus = found.tokens_per_ms, case["gpus"]
    a_gpu = alone.tokens_per_ms if alone else None
    rows = [
        Measurement(
            "train",
            case,
            "tokens_per_ms",
            rate,
            "tokens/ms",
            dense.tokens_per_ms if dense else None,
            rate / dense.tokens_per_ms if dense else None,
            sustained=found.sustained,
            baseline_sustained=dense.sustained if dense else None,
        )
    ]

    def of(
        metric: str,
        unit: str,
        value: float | None,
        baseline: float | None = None,
        ratio: float | None = None,
    ) -> None:
        if value is not None:
            less = baseline / value if baseline else None
            rows.append(Measurement("train", case, metric, value, unit, baseline, ratio or less))

    efficiency = rate / gpus / a_gpu if a_gpu else None
    of("tokens_per_ms_a_gpu", "tokens/ms", rate / gpus, a_gpu, efficiency)
    of("mfu", "of the bf16 peak, dense-equivalent", found.mfu)
    of("memory_GiB", "GiB, peak of rank 0", found.memory_gib, dense.memory_gib if dense else None)
    of("mJ_per_token", "mJ", found.mj_per_token, dense.mj_per_token if dense else None)
    of("sparse_layers", "layers", found.sparse_layers)
    of("union_mean", "neurons of 64 tokens, mean over layers", found.union_mean)
    of("nnz", "neurons per token, mean over layers", found.nnz)
    of("loss", "nats per token", found.loss)
    return rows
