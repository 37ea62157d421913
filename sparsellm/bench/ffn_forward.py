"""One FFN forward at a given pattern: dense eager, dense compiled, and ours in each format.

"Ours" is what a user gets: `SparseFFN` under `sparsellm.accelerate`, in inference mode. In token
order its time includes the layer's share of the sort and the copy of its input in that order. All
sides get the same inputs and weights and alternate call by call (`timing`). Up to 64 tokens the
benchmark is ``ffn_decode``: a dozen calls in a row, eagerly and as a CUDA graph, with several
copies of the weights in turn, so that they do not stay in the cache. Above 64 tokens it is
``ffn_forward``.

`ffn_records` explains the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparsellm
from sparsellm.bench import timing
from sparsellm.bench.ffn_cases import DECODE_TOKENS, Case, Inputs
from sparsellm.bench.ffn_records import case_key, format_key, of_format, rates_of, records
from sparsellm.bench.ffn_sides import (
    dense,
    dense_weights,
    new_ffn,
    refuse_if_off,
    relative_difference,
    state_of,
)
from sparsellm.bench.ffn_sweep import FFNBench, Measured, Skipped
from sparsellm.bench.record import Measurement
from sparsellm.ffn.accelerate import Acceleration
from sparsellm.ffn.dispatch import Kernels
from sparsellm.ffn.types import Format

CALLS_IN_A_ROW = 12  # few tokens per call: the host may take as long as the GPU
SETTLING_CALLS = 25  # by then the choice between dense and sparse kernels is made
MAX_DIFFERENCE = 0.02  # relative to dense; bf16 rounding causes about a third of it


def _launches(num_tokens: int) -> dict[str, timing.Prepare]:
    """Ways to time the calls, by name; the name is empty if the host's time does not matter."""
    if num_tokens > DECODE_TOKENS:
        return {"": timing.in_a_row}
    return {"eager": timing.in_a_row, "graph": timing.graph}


class Built(NamedTuple):
    """The functions that a case calls."""

    sides: dict[str, list[Callable[[], Tensor]]]
    done: dict[Format, Acceleration]  # one of the copies


def run(
    cases: Iterable[Case],
    device: torch.device,
    *,
    traces: Path | None,
    kernels: Kernels,
    formats: Sequence[Format],
    seconds: float,
    with_energy: bool,
    ids: Path | None = None,
) -> Iterator[list[Measurement] | Skipped]:
    """Measures the two ceilings, then case by case; each yielded result is final.

    Args:
        cases: from `ffn_cases.grid`.
        device: a CUDA device.
        traces: a file of `analyze.trace`, for the pattern ``trace``.
        kernels: ``auto``, ``sparse`` or ``dense``, see `sparsellm.accelerate`.
        formats: sparse formats; all of them are timed together.
        seconds: seconds of timing per side.
        with_energy: whether to measure millijoules per token too, for a few cases.
        ids: file of the traces' token ids, see `FFNBench`.

    Raises:
        FileNotFoundError: the trace file does not exist.
        ValueError: the file is not a trace, or there is no energy counter.
    """
    bench = _ForwardBench(
        device, seconds, traces, with_energy, ids, kernels=kernels, formats=formats
    )
    yield [
        Measurement("ceilings", {"what": what}, metric, value, unit)
        for what, metric, value, unit in (
            ("bf16 matmul, 8192³", "tflops", bench.ceilings.tflops, "TFLOP/s"),
            ("copy, 1 GiB", "gbytes_per_s", bench.ceilings.gbytes_per_s, "GB/s"),
        )
    ]
    yield from bench.run(cases)


class _ForwardBench(FFNBench):
    grad_mode = torch.inference_mode

    def __init__(
        self,
        device: torch.device,
        seconds: float,
        traces: Path | None,
        with_energy: bool,
        ids: Path | None,
        *,
        kernels: Kernels,
        formats: Sequence[Format],
    ) -> None:
        super().__init__(device, seconds, traces, with_energy, ids)
        self.kernels = kernels
        self.formats = formats
        self.ceilings = timing.ceilings(device)

    def measure(self, case: Case, inputs: Inputs, extra: dict[str, Any]) -> Iterator[Measured]:
        # TwELL packs each token separately: the order of tokens makes no difference to it.
        formats = [name for name in self.formats if inputs.order is None or name == "union"]
        if not formats:
            return
        sides, done = self._build(case, inputs, formats)
        with torch.inference_mode():
            self.warm_up(sides, dict.fromkeys(formats, SETTLING_CALLS))
            expected = sides["dense_eager"][0]()
            differences = {
                name: relative_difference(sides[name][0](), expected) for name in formats
            }
        for name, difference in differences.items():
            refuse_if_off(f"ours ({name})", difference, MAX_DIFFERENCE)
        for launch, prepare in _launches(case.tokens).items():
            with torch.inference_mode():
                least = CALLS_IN_A_ROW if launch else 1
                ms = timing.ms_of_a_call(sides, prepare, least, self.seconds)
            if inputs.order is not None:
                ms["union"] += self.sort_share(inputs)
            bench = "ffn_decode" if launch else "ffn_forward"
            rates = rates_of(case, inputs, self.ceilings)
            for name in formats:
                chosen = [p for paths in done[name].paths().values() for p in paths.values()]
                key = case_key(case, inputs, extra) | format_key(name)
                key |= {"kernels": self.kernels, "path": chosen[0] if chosen else self.kernels}
                key |= {"launch": launch} if launch else {}
                found = records(bench, key, of_format(ms, name), differences[name], rates)
                yield found, of_format(sides, name)

    def _build(self, case: Case, inputs: Inputs, formats: Sequence[Format]) -> Built:
        """Calls on equal weights; on several copies if the weights must not stay in the cache."""
        state, copies = state_of(case.shape, inputs.w_NK), 1
        if case.tokens <= DECODE_TOKENS:
            copies = timing.copies_beyond_cache(inputs.w_NK.nbytes, self.device)
        names = ("dense_eager", "dense_compiled", *formats)
        sides: dict[str, list[Callable[[], Tensor]]] = {name: [] for name in names}
        done: dict[Format, Acceleration] = {}
        for _ in range(copies):
            for name in formats:
                ffn = new_ffn(case.shape, state, self.device).requires_grad_(False).eval()
                done[name] = sparsellm.accelerate(ffn, kernels=self.kernels, format=name)
                if done[name].left_alone:
                    raise ValueError("; ".join(done[name].left_alone.values()))
                done[name].prefill.order = inputs.order
                sides[name].append(partial(ffn, inputs.x_MK))
            arguments = (inputs.x_MK, *dense_weights(ffn))
            sides["dense_eager"].append(partial(dense, *arguments))
            sides["dense_compiled"].append(partial(self.compiled, *arguments))
        return Built(sides, done)
