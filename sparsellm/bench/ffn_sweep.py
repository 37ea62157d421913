"""Runs the cases of an FFN benchmark: patterns, the layers of a trace, energy, failures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsellm.analyze.trace import load_ids, load_traces
from sparsellm.bench import energy
from sparsellm.bench.ffn_cases import (
    SAMPLE_COMMANDS,
    SAMPLE_TRACES,
    TRACED,
    TRACED_CONTEXT,
    VOCABULARY,
    Case,
    Inputs,
    in_token_order,
    synthetic_inputs,
    trace_inputs,
)
from sparsellm.bench.ffn_records import mean_over_layers, variant_of
from sparsellm.bench.ffn_sides import Sides, dense
from sparsellm.bench.order_costs import sort_ms
from sparsellm.bench.record import Measurement

ENERGY_TOKENS, ENERGY_NNZ = 16_384, (None, 30, 60)  # None: the pattern of a trace
WARM_UP_CALLS = 3

Measured = tuple[list[Measurement], Sides]


class Skipped(NamedTuple):
    """A case that was not measured, or not completely."""

    case: Case
    why: str


class FFNBench(ABC):
    """Base class of the FFN benchmarks.

    Args:
        device: a CUDA device.
        seconds: seconds of timing per side.
        traces: a file of `analyze.trace`, for the pattern ``trace``; None: `SAMPLE_TRACES`.
        with_energy: whether to measure millijoules per token too, for a few cases.
        ids: a file of the traces' token ids, if the traces do not contain them. With ids, traces
            are also measured in token order.

    Raises:
        FileNotFoundError: the trace file does not exist.
        ValueError: the file is not a trace, or there is no energy counter.
    """

    # All calls are made in this context.
    grad_mode: Callable[[], AbstractContextManager[object]]

    def __init__(
        self,
        device: torch.device,
        seconds: float,
        traces: Path | None,
        with_energy: bool,
        ids: Path | None = None,
    ) -> None:
        self.device = device
        self.seconds = seconds
        # None: those in the working directory, if it has them.
        own = SAMPLE_TRACES if SAMPLE_TRACES.is_file() else None
        self.traces = traces = traces or own
        self.named = {"traces": "sample"} if traces == SAMPLE_TRACES else {}
        self.num_layers = (
            0 if traces is None else len(load_traces(traces, TRACED.intermediate_size))
        )
        source = ids or traces
        self.ids_BT = None if source is None else load_ids(source, TRACED_CONTEXT)
        self._sort_ms: dict[int, float] = {}
        self.counter = energy.EnergyCounter(device) if with_energy else None
        self.compiled = torch.compile(dense, dynamic=False)

    @abstractmethod
    def measure(self, case: Case, inputs: Inputs, extra: dict[str, Any]) -> Iterator[Measured]:
        """The records of one pattern for each launch mode and format, and the functions called.

        Args:
            case: the setting.
            inputs: inputs of the case.
            extra: further keys of a record's case, such as the layer of a trace.

        Raises:
            ValueError: the result of ours is wrong, or its kernels are unavailable.
        """

    def run(self, cases: Iterable[Case]) -> Iterator[list[Measurement] | Skipped]:
        """Measures case by case; each yielded result is final."""
        compiled_for = None
        for case in cases:
            if (case.tokens, case.shape) != compiled_for:
                torch.compiler.reset()  # torch.compile would fall back to eager after eight shapes
                compiled_for = (case.tokens, case.shape)
            try:
                if case.nnz is not None:
                    yield from self._synthetic(case)
                elif self.traces is not None:
                    yield from self._layers(case, self.traces)
                else:
                    yield Skipped(
                        case,
                        f"{SAMPLE_TRACES} does not exist; give --traces FILE, or make it: "
                        f"{SAMPLE_COMMANDS}",
                    )
            except torch.OutOfMemoryError:
                yield Skipped(case, "out of memory")
            except (ValueError, RuntimeError, ImportError) as error:
                yield Skipped(case, str(error).partition("\n")[0])
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _synthetic(self, case: Case) -> Iterator[list[Measurement]]:
        """Measures one synthetic pattern."""
        inputs = synthetic_inputs(case, self.device)
        for found, sides in self.measure(case, inputs, {}):
            yield found
            if self._wants_energy(case):
                yield [self._energy(case, found, [sides])]

    def _layers(self, case: Case, traces: Path) -> Iterator[list[Measurement]]:
        """Measures a trace: each layer, then the mean; energy over all layers in turn."""
        every: list[Measurement] = []
        kept: dict[tuple[str | None, ...], list[Sides]] = defaultdict(list)  # by format and order
        for layer in range(self.num_layers):
            inputs = trace_inputs(case, traces, layer, self.device, self.ids_BT)
            for found, sides in self._in_each_order(case, inputs, layer):
                yield found
                every += found
                if self._wants_energy(case):
                    kept[variant_of(found[0])].append(sides)
        means = mean_over_layers(every)
        yield means
        for variant, of_layers in kept.items():
            own = [m for m in means if variant_of(m) == variant]
            yield [self._energy(case, own, of_layers)]

    def _in_each_order(self, case: Case, inputs: Inputs, layer: int) -> Iterator[Measured]:
        """`measure` in the natural order, and in token order if the ids are known."""
        own = {"layer": layer, **self.named}
        yield from self.measure(case, inputs, own)
        ordered = in_token_order(inputs)
        if ordered is not None:
            yield from self.measure(case, ordered, {**own, "token_order": "auto"})

    def sort_share(self, inputs: Inputs) -> float:
        """One layer's share of the time to sort the tokens, in the traced model; milliseconds."""
        if inputs.order is None or inputs.ids_BT is None:
            return 0.0
        num_tokens = len(inputs.x_MK)
        if num_tokens not in self._sort_ms:
            self._sort_ms[num_tokens] = sort_ms(inputs.ids_BT, VOCABULARY, self.seconds)
        return self._sort_ms[num_tokens] / self.num_layers

    def warm_up(self, sides: Sides, num_calls: Mapping[str, int] | None = None) -> None:
        """Calls each side `WARM_UP_CALLS` times, or as often as ``num_calls`` says for it."""
        for name, calls in sides.items():
            for call in calls:
                for _ in range((num_calls or {}).get(name, WARM_UP_CALLS)):
                    call()
                    self.synchronize()  # the density that ours measured has reached the host

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wants_energy(self, case: Case) -> bool:
        wanted = case.tokens == ENERGY_TOKENS and case.nnz in ENERGY_NNZ
        return wanted and self.counter is not None

    def _energy(self, case: Case, found: list[Measurement], kept: list[Sides]) -> Measurement:
        """Millijoules per token and layer; ``found`` gives the approximate time of a call."""
        assert self.counter is not None
        times = next(m for m in found if m.metric == "ms")
        assert times.baseline is not None
        ms = {"dense_compiled": times.baseline * len(kept), "ours": times.value * len(kept)}

        def all_layers(name: str) -> None:
            for sides in kept:
                sides[name][0]()

        with self.grad_mode():
            used = energy.per_call(
                {name: partial(all_layers, name) for name in ms},
                ms,
                self.counter.read,
                self.synchronize,
            )
        ours, baseline = (
            used[name] / (case.tokens * len(kept)) for name in ("ours", "dense_compiled")
        )
        ratio = baseline / ours
        return Measurement(times.bench, times.case, "mJ_per_token", ours, "mJ", baseline, ratio)
