"""One FFN forward at a given activation pattern: dense eager, dense compiled, and ours.

Ours is what a user gets: `SparseFFN` under `sparsellm.accelerate`, in inference mode. All sides see
the same inputs and weights and alternate call by call (`timing`). Up to 64 tokens the benchmark is
``ffn_decode``: weights are rotated through copies that no cache holds, timed eagerly and as a CUDA
graph. Above, it is ``ffn_forward``.

`ffn_records` says what the figures mean.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsellm
from sparsellm.acceleration import Acceleration
from sparsellm.analyze.trace import load_traces
from sparsellm.bench import energy, timing
from sparsellm.bench.ffn_cases import (
    DECODE_TOKENS,
    TRACED,
    Case,
    Inputs,
    synthetic_inputs,
    trace_inputs,
)
from sparsellm.bench.ffn_records import mean_over_layers, rates_of, records
from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Ceilings
from sparsellm.dispatch import Kernels
from sparsellm.ffn import SparseFFN

ENERGY_TOKENS, ENERGY_NNZ = 16_384, (None, 30, 60)  # None: a trace
SETTLING_CALLS = 25  # until the choice between dense and sparse kernels stands
MAX_DIFFERENCE = 0.02  # relative to dense: bf16's rounding is about a third of it

Sides = dict[str, list[Callable[[], Tensor]]]  # a call for each copy of the weights


class Built(NamedTuple):
    """What a case calls."""

    sides: Sides
    done: Acceleration  # of one of the copies


class Skipped(NamedTuple):
    """A case that was not measured, or not to its end."""

    case: Case
    why: str


def dense(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor) -> Tensor:
    """``(relu(x W_g) * (x W_u)) W_d``, or without a gate ``relu(x W_u) W_d``: (M, K)."""
    if w_gate_NK is None:
        h_MN = F.relu(F.linear(x_MK, w_up_NK))
    else:
        h_MN = F.relu(F.linear(x_MK, w_gate_NK)) * F.linear(x_MK, w_up_NK)
    return F.linear(h_MN, w_down_KN)


def run(
    cases: Iterable[Case],
    device: torch.device,
    *,
    traces: Path | None,
    kernels: Kernels,
    seconds: float,
    with_energy: bool,
) -> Iterator[list[Measurement] | Skipped]:
    """Measures case by case; what is yielded is final.

    Args:
        cases: from `ffn_cases.grid`.
        device: a CUDA device.
        traces: a file of `analyze.trace`, for the pattern ``trace``.
        kernels: ``auto``, ``sparse`` or ``dense``, see `sparsellm.accelerate`.
        seconds: of timing, each.
        with_energy: of a few cases, also millijoules a token.

    Raises:
        FileNotFoundError: no such trace file.
        ValueError: it is none, or there is no energy counter.
    """
    num_layers = 0 if traces is None else len(load_traces(traces, TRACED.intermediate_size))
    counter = energy.EnergyCounter(device) if with_energy else None
    bench = _Bench(device, kernels, seconds, timing.ceilings(device), counter)
    yield [
        Measurement("ceilings", {"what": what}, metric, value, unit)
        for what, metric, value, unit in (
            ("bf16 matmul, 8192³", "tflops", bench.ceilings.tflops, "TFLOP/s"),
            ("copy, 1 GiB", "gbytes_per_s", bench.ceilings.gbytes_per_s, "GB/s"),
        )
    ]
    compiled_for = None
    for case in cases:
        if (case.tokens, case.shape) != compiled_for:
            torch.compiler.reset()  # after eight shapes it would give up and run eagerly
            compiled_for = (case.tokens, case.shape)
        try:
            if case.nnz is not None:
                yield from bench.synthetic(case)
            elif traces is not None:
                yield from bench.layers(case, traces, num_layers)
            else:
                yield Skipped(case, "there is no trace; give --traces FILE")
        except torch.OutOfMemoryError:
            yield Skipped(case, "out of memory")
        except (ValueError, RuntimeError) as error:
            yield Skipped(case, str(error).partition("\n")[0])
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Bench:
    """What the cases of a run have in common."""

    def __init__(
        self,
        device: torch.device,
        kernels: Kernels,
        seconds: float,
        ceilings: Ceilings,
        counter: energy.EnergyCounter | None,
    ) -> None:
        self.device = device
        self.kernels = kernels
        self.seconds = seconds
        self.ceilings = ceilings
        self.counter = counter
        self.compiled = torch.compile(dense, dynamic=False)

    def synthetic(self, case: Case) -> Iterator[list[Measurement]]:
        """One pattern."""
        inputs = synthetic_inputs(case, self.device)
        built = self._build(case, inputs)
        for found in self._measure(case, inputs, built, {}):
            yield found
            if self._wants_energy(case):
                yield [self._energy(case, found, [built.sides])]

    def layers(self, case: Case, traces: Path, num_layers: int) -> Iterator[list[Measurement]]:
        """A trace: each layer, then the mean over layers; energy is of all layers in turn."""
        every: list[Measurement] = []
        kept: list[Sides] = []
        for layer in range(num_layers):
            inputs = trace_inputs(case, traces, layer, self.device)
            built = self._build(case, inputs)
            for found in self._measure(case, inputs, built, {"layer": layer}):
                yield found
                every += found
            if self._wants_energy(case):
                kept.append(built.sides)
        means = mean_over_layers(every)
        yield means
        if kept:
            yield [self._energy(case, means, kept)]

    def _build(self, case: Case, inputs: Inputs) -> Built:
        """Calls on equal weights, in copies: several where they must not stay in a cache."""
        k, n, gated = case.shape
        generator = torch.Generator(self.device).manual_seed(1)

        def matrix(rows: int, columns: int) -> Tensor:
            shape = (rows, columns)
            return torch.randn(shape, generator=generator, device=self.device) / columns**0.5

        state = {"up_proj.weight": matrix(n, k), "down_proj.weight": matrix(k, n)}
        state["gate_proj.weight" if gated else "up_proj.weight"] = inputs.w_NK
        copies = 1
        if case.tokens <= DECODE_TOKENS:
            copies = timing.copies_beyond_cache(inputs.w_NK.nbytes, self.device)
        sides: Sides = {"dense_eager": [], "dense_compiled": [], "ours": []}
        for _ in range(copies):
            with self.device:
                module = SparseFFN(k, n, gated=gated).to(torch.bfloat16)
            module.load_state_dict(state)
            module.requires_grad_(False).eval()
            done = sparsellm.accelerate(module, kernels=self.kernels)
            if done.left_alone:
                raise ValueError("; ".join(done.left_alone.values()))
            gate = module.gate_proj.weight if gated else None
            weights = (inputs.x_MK, gate, module.up_proj.weight, module.down_proj.weight)
            sides["dense_eager"].append(partial(dense, *weights))
            sides["dense_compiled"].append(partial(self.compiled, *weights))
            sides["ours"].append(partial(module, inputs.x_MK))
        return Built(sides, done)

    def _measure(
        self, case: Case, inputs: Inputs, built: Built, extra: dict[str, Any]
    ) -> Iterator[list[Measurement]]:
        """The records of one pattern, those of each way to launch together."""
        sides = built.sides
        with torch.inference_mode():
            self._warm_up(sides)
            difference = _difference(sides["ours"][0](), sides["dense_eager"][0]())
            if not difference <= MAX_DIFFERENCE:
                raise ValueError(f"ours is {difference:.1%} off dense: no time is worth that")
            ms = timing.interleaved(sides, self.seconds)
        chosen = [path for paths in built.done.paths().values() for path in paths.values()]
        key = {
            "M": case.tokens,
            "K": case.shape.hidden_size,
            "N": case.shape.intermediate_size,
            "gated": case.shape.gated,
            "pattern": case.pattern,
            **extra,
            "nnz": round(inputs.nnz, 1) if case.nnz is None else case.nnz,
            "measured_nnz": round(inputs.nnz, 1),
            "union_64": round(inputs.union_64, 1),
            "kernels": self.kernels,
            "path": chosen[0] if chosen else self.kernels,
        }
        rates = rates_of(case, inputs, self.ceilings)
        if case.tokens > DECODE_TOKENS:
            yield records("ffn_forward", key, ms, difference, rates)
            return
        yield records("ffn_decode", key | {"launch": "eager"}, ms, difference, rates)
        with torch.inference_mode():
            graphs = {name: [timing.graph(calls)] for name, calls in sides.items()}
            whole = timing.interleaved(graphs, self.seconds)
        ms = {name: value / len(sides[name]) for name, value in whole.items()}
        yield records("ffn_decode", key | {"launch": "graph"}, ms, difference, rates)

    def _warm_up(self, sides: Sides) -> None:
        for name, calls in sides.items():
            for call in calls:
                for _ in range(SETTLING_CALLS if name == "ours" else 3):
                    call()
                    self._synchronize()  # what ours has seen of the density has arrived

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wants_energy(self, case: Case) -> bool:
        wanted = case.tokens == ENERGY_TOKENS and case.nnz in ENERGY_NNZ
        return wanted and self.counter is not None

    def _energy(self, case: Case, found: list[Measurement], kept: list[Sides]) -> Measurement:
        """Millijoules a token and layer; ``found`` tells about how long a call takes."""
        assert self.counter is not None
        times = next(m for m in found if m.metric == "ms")
        assert times.baseline is not None
        ms = {"dense_compiled": times.baseline * len(kept), "ours": times.value * len(kept)}

        def all_layers(name: str) -> None:
            for sides in kept:
                sides[name][0]()

        with torch.inference_mode():
            used = energy.per_call(
                {name: partial(all_layers, name) for name in ms},
                ms,
                self.counter.read,
                self._synchronize,
            )
        ours, baseline = (
            used[name] / (case.tokens * len(kept)) for name in ("ours", "dense_compiled")
        )
        ratio = baseline / ours
        return Measurement("ffn_forward", times.case, "mJ_per_token", ours, "mJ", baseline, ratio)


def _difference(found: Tensor, expected: Tensor) -> float:
    error = (found.float() - expected.float()).norm()
    return float(error / expected.float().norm().clamp(min=1e-30))
