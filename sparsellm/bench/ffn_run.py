"""Runs the cases of `sparsellm bench ffn` and ``ffn-train``: patterns, layers of a trace, variants.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

import argparse
import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.analyze.trace import load_ids, load_traces
from sparsellm.bench import ffn_cases
from sparsellm.bench.compare import Comparison, compare, gpu
from sparsellm.bench.ffn_cases import (
    SAMPLE_COMMANDS,
    SAMPLE_TRACES,
    VOCABULARY,
    Case,
    FFNVariant,
    Inputs,
    Shape,
)
from sparsellm.bench.record import Found, Measurement
from sparsellm.bench.timing import Side, sustained
from sparsellm.ffn.kernels.gpu_architecture import FORCED
from sparsellm.ffn.module import SparseFFN
from sparsellm.ffn.token_order import token_order

Build = Callable[[Case, Inputs, FFNVariant, dict[str, Any]], Comparison]


class FFNBench:
    """The cases that the options (`cli.ffn_options`) select, and what they share.

    Raises:
        FileNotFoundError: the trace file does not exist.
        ValueError: there is no GPU, no case, or the file is not a trace.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device | None = None) -> None:
        self.cases = ffn_cases.selected(options)
        self.device = device or gpu(options.benchmark)
        self.seconds: float = options.seconds
        every = itertools.product(options.format, options.precision)
        self.variants = [FFNVariant(name, own == "fp8") for name, own in dict.fromkeys(every)]
        # Without --traces those in the working directory, if it has them.
        self.traces = options.traces or (SAMPLE_TRACES if SAMPLE_TRACES.is_file() else None)
        self.num_layers = 0
        if self.traces is not None:
            self.num_layers = len(load_traces(self.traces, ffn_cases.TRACED.intermediate_size))
        self.ids_BT = None if self.traces is None else load_ids(self.traces)
        self._sort_ms: dict[int, float] = {}

    @cached_property
    def compiled(self) -> Callable[..., Tensor]:
        """`dense` under torch.compile: the baseline."""
        return torch.compile(dense, dynamic=False)

    def run(self, build: Build) -> Iterator[Found]:
        """Measures case by case, each by what ``build`` makes of it and of the keys that name it.

        Each list that it yields is final; a string says what it skipped.
        """
        compiled_for = None
        for case in self.cases:
            if (case.tokens, case.shape) != compiled_for:
                torch.compiler.reset()  # torch.compile would fall back to eager after eight shapes
                compiled_for = (case.tokens, case.shape)
            try:
                yield from self._of_case(case, build)
            except torch.OutOfMemoryError:
                yield f"skipped: {case}: out of memory"
            except (ValueError, RuntimeError, ImportError) as error:
                yield f"skipped: {case}: {str(error).partition(chr(10))[0]}"
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _of_case(self, case: Case, build: Build) -> Iterator[Found]:
        if case.nnz is not None:
            yield from self._of_inputs(
                case, ffn_cases.synthetic_inputs(case, self.device), {}, build
            )
            return
        if self.traces is None:
            raise ValueError(
                f"{SAMPLE_TRACES} does not exist; give --traces FILE, or make it: {SAMPLE_COMMANDS}"
            )
        every: list[Measurement] = []
        named = {"traces": "sample"} if self.traces == SAMPLE_TRACES else {}
        for layer in range(self.num_layers):
            inputs = ffn_cases.trace_inputs(case, self.traces, layer, self.device, self.ids_BT)
            for found in self._of_inputs(case, inputs, {"layer": layer, **named}, build):
                every += found
                yield found
        yield from mean_over_layers(every)

    def _of_inputs(
        self, case: Case, inputs: Inputs, named: dict[str, Any], build: Build
    ) -> Iterator[list[Measurement]]:
        """Each variant in the natural order, and in token order if the ids are known."""
        ordered = ffn_cases.in_token_order(inputs)
        for variant in self.variants:
            orders = [inputs]
            if ordered is not None and variant.format == "union":  # TwELL packs each token alone
                orders.append(ordered)
            for own in orders:
                key = case_key(case, own, named) | variant.key
                yield compare(build(case, own, variant, key), self.device, self.seconds)

    def sort_share(self, inputs: Inputs) -> float:
        """One layer's share of the time to sort the tokens, in the traced model; milliseconds."""
        if inputs.order is None or inputs.ids_BT is None:
            return 0.0
        num_tokens = len(inputs.x_MK)
        if num_tokens not in self._sort_ms:
            side = Side({"sort": partial(token_order, inputs.ids_BT, VOCABULARY)})
            times = sustained({"sort": side}, self.device, self.seconds)
            self._sort_ms[num_tokens] = times["sort"].ms.median
        return self._sort_ms[num_tokens] / self.num_layers


def case_key(case: Case, inputs: Inputs, named: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of every record of a case: its setting, what names it, and the measured inputs."""
    return {
        "M": case.tokens,
        "K": case.shape.hidden_size,
        "N": case.shape.intermediate_size,
        "gated": case.shape.gated,
        "pattern": case.pattern,
        **named,
        **({} if inputs.order is None else {"token_order": "auto"}),
        **({"arch": os.environ[FORCED]} if os.environ.get(FORCED) else {}),
        "nnz": round(inputs.nnz, 1) if case.nnz is None else case.nnz,
        "measured_nnz": round(inputs.nnz, 1),
        "union_64": round(inputs.union_64, 1),
    }


_OF_A_LAYER = frozenset({"layer", "path", "nnz", "measured_nnz", "union_64"})


def mean_over_layers(found: Sequence[Measurement]) -> Iterator[list[Measurement]]:
    """Means over the key ``layer``, a list per variant; ratios are ratios of the means."""
    groups: dict[tuple[Any, ...], dict[str, list[Measurement]]] = defaultdict(dict)
    for m in found:
        variant = tuple((key, value) for key, value in m.case.items() if key not in _OF_A_LAYER)
        groups[variant].setdefault(m.metric, []).append(m)
    for metrics in groups.values():
        yield [_mean(members) for members in metrics.values()]


def _mean(members: Sequence[Measurement]) -> Measurement:
    first = members[0]
    case = first.case | {"layer": "mean"}
    for name in ("nnz", "measured_nnz", "union_64"):
        case[name] = round(statistics.mean(m.case[name] for m in members), 1)
    case["path"] = "/".join(dict.fromkeys(m.case["path"] for m in members))
    value = statistics.mean(m.value for m in members)
    baselines = [m.baseline for m in members if m.baseline is not None]
    baseline = statistics.mean(baselines) if baselines else None
    return replace(
        first,
        case=case,
        value=value,
        baseline=baseline,
        ratio=baseline / value if baseline is not None else None,
        sustained=_mean_of([m.sustained for m in members]),
        baseline_sustained=_mean_of([m.baseline_sustained for m in members]),
    )


def _mean_of(members: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    given = [member for member in members if member is not None]
    if len(given) < len(members):
        return None
    return {key: statistics.mean(one[key] for one in given) for key in given[0]}


def dense(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor) -> Tensor:
    """``(relu(x W_g) * (x W_u)) W_d``, or without a gate ``relu(x W_u) W_d``: (M, K)."""
    if w_gate_NK is None:
        h_MN = F.relu(F.linear(x_MK, w_up_NK))
    else:
        h_MN = F.relu(F.linear(x_MK, w_gate_NK)) * F.linear(x_MK, w_up_NK)
    return F.linear(h_MN, w_down_KN)


def dense_weights(ffn: SparseFFN) -> tuple[Tensor | None, Tensor, Tensor]:
    """The weights that `dense` takes."""
    gate = ffn.gate_proj.weight if ffn.gated else None
    return gate, ffn.up_proj.weight, ffn.down_proj.weight


def new_ffn(shape: Shape, w_NK: Tensor) -> SparseFFN:
    """A bf16 FFN: the weight that decides the pattern is given, the others are Gaussian."""
    k, n, gated = shape
    generator = torch.Generator(w_NK.device).manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        size = (rows, columns)
        return torch.randn(size, generator=generator, device=w_NK.device) / columns**0.5

    state = {"up_proj.weight": matrix(n, k), "down_proj.weight": matrix(k, n)}
    state["gate_proj.weight" if gated else "up_proj.weight"] = w_NK
    with w_NK.device:
        ffn = SparseFFN(k, n, gated=gated).to(torch.bfloat16)
    ffn.load_state_dict(state)
    return ffn
