"""Runs the cases of `sparsellm bench ffn` and ``ffn-train``: patterns, layers of a trace, variants.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.analyze.trace import load_traces
from sparsellm.bench import ffn_cases
from sparsellm.bench.compare import compare, gpu
from sparsellm.bench.ffn_cases import (
    SAMPLE_COMMANDS,
    SAMPLE_TRACES,
    VOCABULARY,
    Case,
    Layer,
    Traced,
    in_token_order,
)
from sparsellm.bench.patterns import fit_gate
from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Configuration, sustained
from sparsellm.ffn.kernels.compiler.gpu_architecture import FORCED
from sparsellm.ffn.reference import activation_function
from sparsellm.ffn.token_order import token_order
from sparsellm.ffn.training_path.module import SparseFFN

# Compares a layer with dense; the keys of its records are given.
MeasureLayer = Callable[[Layer, dict[str, Any]], list[Measurement]]


class FFNBench:
    """The cases that the options (`cli.ffn_options`) select, and what they share.

    Raises:
        FileNotFoundError: the trace file does not exist.
        ValueError: there is no GPU, no case, or the file is not a trace.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device | None = None) -> None:
        # Patterns are fitted faster; all that is timed is bf16.
        torch.set_float32_matmul_precision("high")
        self.cases = ffn_cases.selected(options)
        self.device = device or gpu(options.benchmark)
        self._seconds: float = options.seconds
        self.compare = partial(compare, device=self.device, seconds=self._seconds)
        self.compiled = torch.compile(dense, dynamic=False)  # the baseline
        self._ways = list(dict.fromkeys(itertools.product(options.format, options.precision)))
        # Without --traces, the sample in the working directory is taken, if there is one.
        path = options.traces or (SAMPLE_TRACES if SAMPLE_TRACES.is_file() else None)
        self._is_sample = path == SAMPLE_TRACES
        width = ffn_cases.TRACED.intermediate_size
        self._traces, ids = ([], None) if path is None else load_traces(path, width)
        self._ids_BT = None if ids is None else torch.from_numpy(ids).to(self.device)
        self._sort_ms: dict[int, float] = {}

    def run(self, measure: MeasureLayer) -> Iterator[list[Measurement]]:
        """Measures case by case, and prints which ones it skips; each yielded list is final."""
        compiled_for = None
        for case in self.cases:
            if (case.tokens, case.shape) != compiled_for:
                torch.compiler.reset()  # torch.compile would fall back to eager after eight shapes
                compiled_for = (case.tokens, case.shape)
            try:
                yield from self._of_case(case, measure)
            except (ValueError, RuntimeError, ImportError) as error:
                print(f"skipped: {case}: {str(error).partition(chr(10))[0]}", flush=True)
            torch.cuda.empty_cache()

    def _of_case(self, case: Case, measure: MeasureLayer) -> Iterator[list[Measurement]]:
        """Each way to compute each layer; of a trace also the means over layers, for each way."""
        of_layers: list[list[list[Measurement]]] = []
        for layer, named in self._layers(case):
            of_layers.append([])
            for way in self._each_way(layer):
                measurements = measure(way, case_key(case, way, named))
                of_layers[-1].append(measurements)
                yield measurements
        if case.pattern == "trace":
            yield from map(mean_over_layers, zip(*of_layers, strict=True))

    def _layers(self, case: Case) -> Iterator[tuple[Layer, dict[str, Any]]]:
        """The layers of a case, and the keys that tell them apart."""
        if case.pattern != "trace":
            yield ffn_cases.synthetic_layer(case, self.device), {}
        elif not self._traces:
            raise ValueError(
                f"{SAMPLE_TRACES} does not exist; give --traces FILE, or make it: {SAMPLE_COMMANDS}"
            )
        else:
            named = {"traces": "sample"} if self._is_sample else {}
            for number, traced in enumerate(self._fitted):
                yield traced.layer(case.tokens, self._ids_BT), {"layer": number, **named}

    @cached_property
    def _fitted(self) -> list[Traced]:
        """The inputs of each traced layer; kept, since it takes seconds to find them."""
        patterns = (trace.pattern(self.device) for trace in self._traces)
        k = ffn_cases.TRACED.hidden_size
        return [Traced(*fit_gate(pattern_MN, k), pattern_MN.sum(1)) for pattern_MN in patterns]

    def _each_way(self, layer: Layer) -> Iterator[Layer]:
        """The layer in each format and precision; if ids are known, with sorted tokens as well."""
        orders = {"union": [layer], "twell": [layer]}
        if layer.ids_BT is not None:  # TwELL packs each token alone: to it the order is all one
            orders["union"].append(in_token_order(layer, layer.ids_BT))
        for format, precision in self._ways:
            for ordered in orders[format]:
                yield ordered._replace(format=format, fp8=precision == "fp8")

    def sort_share(self, layer: Layer) -> float:
        """One layer's share of the time to sort the tokens, in the traced model; milliseconds."""
        if layer.order is None or layer.ids_BT is None:
            return 0.0
        num_tokens = len(layer.x_MK)
        if num_tokens not in self._sort_ms:
            configuration = Configuration({"sort": partial(token_order, layer.ids_BT, VOCABULARY)})
            times = sustained({"sort": configuration}, self.device, self._seconds)
            self._sort_ms[num_tokens] = float(np.median(times["sort"].ms))
        return self._sort_ms[num_tokens] / len(self._traces)


def case_key(case: Case, layer: Layer, named: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of every record of a layer; some are left out where they have the default."""
    return {
        "M": case.tokens,
        "K": case.shape.hidden_size,
        "N": case.shape.intermediate_size,
        "gated": case.shape.gated,
        "pattern": case.pattern,
        **named,
        **({} if layer.order is None else {"token_order": "auto"}),
        **({"arch": os.environ[FORCED]} if os.environ.get(FORCED) else {}),
        "nnz": round(layer.nnz, 1) if case.nnz is None else case.nnz,
        "measured_nnz": round(layer.nnz, 1),
        "union_64": round(layer.union_64, 1),
        **({} if layer.format == "union" else {"format": layer.format}),
        **({"precision": "fp8"} if layer.fp8 else {}),
    }


def mean_over_layers(layers: Sequence[list[Measurement]]) -> list[Measurement]:
    """The mean of each metric; ratios are ratios of the means."""
    mean_measurements = []
    for members in zip(*layers, strict=True):
        case = members[0].case | {"layer": "mean"}
        for key in ("nnz", "measured_nnz", "union_64"):
            case[key] = round(_mean([m.case[key] for m in members]), 1)
        case["path"] = "/".join(dict.fromkeys(m.case["path"] for m in members))
        names = ("value", "baseline", "sustained", "baseline_sustained")
        mean = {name: _mean([getattr(m, name) for m in members]) for name in names}
        ratio = mean["baseline"] and mean["baseline"] / mean["value"]
        mean_measurements.append(replace(members[0], case=case, ratio=ratio, **mean))
    return mean_measurements


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, or of each key of mappings; None if the values are None."""
    if values[0] is None:
        return None
    if isinstance(values[0], Mapping):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return statistics.mean(values)


def dense(
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    w_down_KN: Tensor,
    activation: str = "relu",
) -> Tensor:
    """``(act(x W_g) * (x W_u)) W_d``, or without a gate ``act(x W_u) W_d``: (M, K)."""
    act = activation_function(activation)
    if w_gate_NK is None:
        h_MN = act(F.linear(x_MK, w_up_NK))
    else:
        h_MN = act(F.linear(x_MK, w_gate_NK)) * F.linear(x_MK, w_up_NK)
    return F.linear(h_MN, w_down_KN)


def dense_weights(ffn: SparseFFN) -> tuple[Tensor | None, Tensor, Tensor]:
    """The weights that `dense` takes."""
    gate = ffn.gate_proj.weight if ffn.gated else None
    return gate, ffn.up_proj.weight, ffn.down_proj.weight


def new_ffn(layer: Layer) -> SparseFFN:
    """A bf16 FFN: the weight that decides the pattern is given, the others are Gaussian."""
    n, k = layer.w_NK.shape
    device = layer.w_NK.device
    generator = torch.Generator(device).manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device) / columns**0.5

    state = {"up_proj.weight": matrix(n, k), "down_proj.weight": matrix(k, n)}
    state["gate_proj.weight" if layer.gated else "up_proj.weight"] = layer.w_NK
    with device:
        ffn = SparseFFN(k, n, gated=layer.gated).to(torch.bfloat16)
    ffn.load_state_dict(state)
    return ffn
