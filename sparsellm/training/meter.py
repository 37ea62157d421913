"""The record of a step, with the run's speed, and its progress line."""

import resource
import sys
import time

import torch

from sparsellm.ffn.kernels.compiler.compile import compile_seconds
from sparsellm.ffn.kernels.compiler.gpu_architecture import device_name
from sparsellm.recipe import Recipe
from sparsellm.recipe.estimate import executed_flops_per_token, peak_flops, train_flops_per_token
from sparsellm.runs.telemetry.metrics import METRICS, duration
from sparsellm.runs.telemetry.records import TrainRecord
from sparsellm.training.run import Run
from sparsellm.training.step import StepTotals


class Meter:
    """Throughput between records, not counting validation and checkpoints."""

    def __init__(self, run: Run) -> None:
        peak = (
            peak_flops(device_name(run.accelerator.device))
            if run.recipe.runtime.precision != "fp32"
            else None
        )
        self._peak = peak * run.accelerator.num_processes if peak else None
        self._flops = train_flops_per_token(run.recipe)
        self._began = self._since = time.perf_counter()
        self._paused = 0.0
        self._compiled = self._compiled_when_paused = compile_seconds()
        self._train_seconds = 0.0
        self._step = run.step

    def pause(self) -> None:
        """Stops the clock."""
        self._paused = time.perf_counter()
        self._compiled_when_paused = compile_seconds()

    def resume(self) -> None:
        """Starts it again."""
        self._since += time.perf_counter() - self._paused
        self._compiled += compile_seconds() - self._compiled_when_paused

    def record(self, run: Run, totals: StepTotals) -> TrainRecord:
        """The record of the last step; starts the next interval."""
        reading = totals.reading
        assert reading.sparsity is not None
        names = run.loader.corpus_names
        nnz_L, sparse_L = reading.sparsity.nnz_mean, reading.kernels.sparse
        executed = executed_flops_per_token(run.recipe, nnz_L, sparse_L)
        now, compiled = time.perf_counter(), compile_seconds()
        step_seconds = (now - self._since) / (run.step - self._step)
        throughput = run.recipe.train.global_batch_tokens / step_seconds
        # Compilation is no time of training.
        self._train_seconds += now - self._since - (compiled - self._compiled)
        self._since, self._compiled, self._step = now, compiled, run.step
        speed = {
            "tokens_per_second": throughput,
            "step_ms": 1e3 * step_seconds,
            "mfu": throughput * executed / self._peak if self._peak else None,
            "mfu_dense": throughput * self._flops / self._peak if self._peak else None,
            "memory_gib": _peak_memory_gib(run.accelerator.device),
            "seconds": now - self._began,
            "train_seconds": self._train_seconds,
            "compile_seconds": compiled - run.compiled_before,
        }
        return TrainRecord(
            run.step,
            run.tokens,
            totals.values | speed,
            totals.l1_by_layer,
            reading.sparsity,
            reading.kernels,
            run.data_position.tokens if len(names) > 1 else {},
            {n: epoch for n, epoch in zip(names, reading.epochs_C, strict=True) if epoch},
            reading.layer_metrics,
        )


def _peak_memory_gib(device: torch.device) -> float:
    """Peak memory since the last call; on a CPU since the process began."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def progress_line(record: TrainRecord, recipe: Recipe) -> str:
    """A progress line of under 160 columns."""
    total, line = recipe.train.steps, record.line()
    shown = [(m, m.value(line, recipe)) for m in METRICS if m.progress]
    parts = [text for m, value in shown if value is not None and (text := m.text(value))]
    throughput = record.values["tokens_per_second"]
    assert throughput is not None
    remaining = (total - record.step) * recipe.train.global_batch_tokens
    head = f"step {record.step:>{len(str(total))}}/{total}"
    text = " | ".join([head, *parts, f"eta {duration(remaining / throughput)}"])
    return text.replace(" | (", " (")  # a share follows its number
