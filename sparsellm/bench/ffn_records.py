"""Records of a case of `sparsellm bench ffn` and ``ffn-train``, and the lines they print.

The baseline of time, energy and memory is dense compiled, and ``ratio`` is baseline over value:
above 1 is better than dense compiled. The baseline of a rate is what the GPU reached on a large
matmul or copy in the same run, and ``ratio`` is value over baseline.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from sparsellm.bench.ffn_cases import DECODE_TOKENS, Case, Inputs
from sparsellm.bench.memory import StepMemory
from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Ceilings
from sparsellm.ffn.kernels.gpu_architecture import FORCED
from sparsellm.ffn.types import Format

RATES = ("tflops", "gbytes_per_s")  # prefix of the metrics whose higher values are better
PARTS = {"forward_ms": "forward", "memory_MiB": "holds", "peak_MiB": "peak"}  # printed names


class StepTimes(NamedTuple):
    """Times in ms of a forward that keeps what the backward needs, and of that backward."""

    forward: float
    backward: float


class Rates(NamedTuple):
    """Work of a forward in units per millisecond, and the GPU's measured ceiling."""

    metric: str
    unit: str
    needed: float  # work that the pattern requires: the whole gate, the rest only where it fires
    dense: float
    ceiling: float


def case_key(case: Case, inputs: Inputs, extra: dict[str, Any]) -> dict[str, Any]:
    """The keys of every record of a case: its setting, ``extra``, and the measured inputs."""
    return {
        "M": case.tokens,
        "K": case.shape.hidden_size,
        "N": case.shape.intermediate_size,
        "gated": case.shape.gated,
        "pattern": case.pattern,
        **extra,
        **({"arch": os.environ[FORCED]} if os.environ.get(FORCED) else {}),
        "nnz": round(inputs.nnz, 1) if case.nnz is None else case.nnz,
        "measured_nnz": round(inputs.nnz, 1),
        "union_64": round(inputs.union_64, 1),
    }


def format_key(name: Format) -> dict[str, Any]:
    """The key that names the format: omitted for the union, which older records do not name."""
    return {} if name == "union" else {"format": name}


Value = TypeVar("Value")


def of_format(sides: Mapping[str, Value], name: Format) -> dict[str, Value]:
    """The values of dense and of one format, the latter as ``ours``; other formats are omitted."""
    formats = get_args(Format)
    own = {side: value for side, value in sides.items() if side not in formats}
    return own | {"ours": sides[name]}


def rates_of(case: Case, inputs: Inputs, ceilings: Ceilings) -> Rates:
    """Work of one forward: bytes of weights if decoding, otherwise FLOPs."""
    k, n, gated = case.shape
    others = 2 if gated else 1  # matrices of which only the active neurons' part is needed
    if case.tokens <= DECODE_TOKENS:
        row, fired, scale = 2 * k, inputs.union_64, 1e6  # bytes; bytes/ms to GB/s
        metric, unit, ceiling = "gbytes_per_s", "GB/s of weights", ceilings.gbytes_per_s
    else:
        row, fired, scale = 2 * k * case.tokens, inputs.nnz, 1e9  # FLOPs; FLOP/ms to TFLOP/s
        metric, unit, ceiling = "tflops", "TFLOP/s", ceilings.tflops
    needed, dense = row * (n + others * fired) / scale, row * n * (1 + others) / scale
    return Rates(metric, unit, needed, dense, ceiling)


def records(
    bench: str, case: dict[str, Any], ms: dict[str, float], difference: float, rates: Rates
) -> list[Measurement]:
    """The records of a case of ``ffn_decode`` or ``ffn_forward``.

    Args:
        bench: ``ffn_decode`` or ``ffn_forward``.
        case: keys of the case.
        ms: times of ``ours``, ``dense_compiled`` and ``dense_eager``.
        difference: relative norm of the difference between ours and dense eager.
        rates: rates of the case.
    """
    compiled, ceiling = ms["dense_compiled"], rates.ceiling

    def took(metric: str, value: float) -> Measurement:
        return Measurement(bench, case, metric, value, "ms", compiled, compiled / value)

    def rate(metric: str, value: float) -> Measurement:
        return Measurement(bench, case, metric, value, rates.unit, ceiling, value / ceiling)

    return [
        took("ms", ms["ours"]),
        took("ms_dense_eager", ms["dense_eager"]),
        rate(rates.metric, rates.needed / ms["ours"]),
        rate(f"{rates.metric}_dense", rates.dense / compiled),
        Measurement(bench, case, "difference", difference, "relative to dense eager"),
    ]


def train_records(
    case: dict[str, Any],
    times: dict[str, StepTimes],
    memory: dict[str, StepMemory],
    difference: float,
) -> list[Measurement]:
    """The records of a case of ``ffn_train``.

    Args:
        case: keys of the case.
        times: times of ``ours`` and ``dense_compiled``.
        memory: memory of both; empty without a GPU.
        difference: the largest relative norm of a difference, of y and the gradients.
    """

    def against(metric: str, unit: str, values: dict[str, float]) -> Measurement:
        ours, compiled = values["ours"], values["dense_compiled"]
        return Measurement("ffn_train", case, metric, ours, unit, compiled, compiled / ours)

    both = {name: of.forward + of.backward for name, of in times.items()}
    forward = {name: of.forward for name, of in times.items()}
    found = [against("ms", "ms", both), against("forward_ms", "ms", forward)]
    if memory:
        held = {name: of.held for name, of in memory.items()}
        peak = {name: of.peak for name, of in memory.items()}
        found += [against("memory_MiB", "MiB", held), against("peak_MiB", "MiB", peak)]
    unit = "relative to dense eager"
    return [*found, Measurement("ffn_train", case, "difference", difference, unit)]


def variant_of(m: Measurement) -> tuple[str | None, ...]:
    """Format and token order of ours, if they are not the defaults."""
    return m.case.get("format"), m.case.get("token_order")


def mean_over_layers(found: list[Measurement]) -> list[Measurement]:
    """Means of values and baselines over the key ``layer``; ratios are ratios of the means."""
    groups: dict[tuple[Any, ...], list[Measurement]] = defaultdict(list)
    for m in found:
        groups[m.metric, m.case.get("launch"), *variant_of(m)].append(m)
    means = []
    for members in groups.values():
        first = members[0]
        case = first.case | {"layer": "mean"}
        for name in ("nnz", "measured_nnz", "union_64"):
            case[name] = round(statistics.mean(m.case[name] for m in members), 1)
        case["path"] = "/".join(dict.fromkeys(m.case["path"] for m in members))
        value = statistics.mean(m.value for m in members)
        baseline = ratio = None
        if first.baseline is not None:
            baseline = statistics.mean(m.baseline for m in members if m.baseline is not None)
            ratio = value / baseline if first.metric.startswith(RATES) else baseline / value
        means.append(
            Measurement(first.bench, case, first.metric, value, first.unit, baseline, ratio)
        )
    return means


def rows(found: list[Measurement]) -> list[str]:
    """Printed lines: one per case and launch."""
    by_case: dict[str, list[Measurement]] = defaultdict(list)
    for m in found:
        by_case[str(m.case)].append(m)
    return [_row(members) for members in by_case.values()]


def _row(members: list[Measurement]) -> str:
    case, metrics = members[0].case, {m.metric: m for m in members}
    if "what" in case:
        return f"ceiling: {members[0].value:,.0f} {members[0].unit} ({case['what']})"
    layer = f" layer {case['layer']}" if "layer" in case else ""
    layer += " in token order" if "token_order" in case else ""
    launch = f" {case['launch']}" if "launch" in case else ""
    name = f"M {case['M']} {case['K']}/{case['N']} {case['pattern']}{layer} nnz {case['nnz']}"
    by = f" {case['format']}" if "format" in case else ""
    name = f"{name} union {case['union_64']:.0f}{launch} ({case['path']}{by})"
    if "mJ_per_token" in metrics:
        m = metrics["mJ_per_token"]
        return f"{name:72} {m.value:.4f} mJ per token, dense {m.baseline:.4f}: {m.ratio:.2f}×"
    ms = metrics["ms"]
    if "forward_ms" in metrics:
        parts = [f"{ms.value:.4f} ms, dense {ms.baseline:.4f}: {ms.ratio:.2f}×"]
        parts += [
            f"{PARTS[m.metric]} {m.value:.4g} {m.unit} {m.ratio:.2f}×"
            for m in members
            if m.metric in PARTS
        ]
        return f"{name:72} {', '.join(parts)}"
    eager = metrics["ms_dense_eager"]
    rate = next(m for m in members if m.metric in RATES)
    return (
        f"{name:72} {ms.value:.4f} ms, dense {ms.baseline:.4f} (eager {eager.value:.4f}): "
        f"{ms.ratio:.2f}×, {rate.ratio:.0%} of the ceiling"
    )
