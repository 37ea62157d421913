"""One measured number is one line of ``benchmarks/results.jsonl``; tables are made from it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsellm.runs.session import commit

RESULTS = Path("benchmarks/results.jsonl")
TABLE = Path("benchmarks/RESULTS.md")
FFN_LEGEND = """Times (ms of one FFN) and energy: in brackets baseline over value, the baseline \
being dense under torch.compile; above 1 is better. Rates: in brackets the share of what a large \
matmul (TFLOP/s) or copy (GB/s, of weights) reached in the same run; ours counts what the pattern \
needs, the gate whole and the other matrices where it fires. `difference`: of ours from dense eager.

"""
TRAIN_LEGEND = """Forward and backward of one FFN in training, with the gradients of x and all \
weights: ours on the sparse path, with statistics and L1; in brackets baseline over value, the \
baseline being the plain formula under torch.compile; above 1 is better. `forward_ms`: the \
forward alone. `memory_MiB`: what is kept from forward to backward, without x, y and weights; \
`peak_MiB`: the most at any moment, with y and all gradients. `difference`: the largest, of y, \
the L1 sum and the gradients, of ours from dense eager.

"""
DISPATCH_LEGEND = """Forward and backward in training at rising unions (neurons that 64 tokens in \
a row fire between them): sparse, and in brackets dense over sparse, as measured (dense compiled) \
and as a run predicts it from its measured costs. `auto` leaves the sparse path above \
`leave_union` and returns to it below `return_union`; `crossover_union`: where both were measured \
to be equal.

"""
PAPER = """The paper's own figures (arXiv 2603.23198), dense → sparse at its λ = 2e-5, a GPU of a \
node of eight H100 (its energy implies SXM), 1,048,576 tokens a step:

| model | training tokens/ms | peak GB | forward tokens/ms | forward mJ a token | mean non-zeros |
| --- | --- | --- | --- | --- | --- |
| 0.5B | 97.3 → 95.9 (0.99×) | 26.2 → 21.2 | 410 → 480 (1.17×) | 1.63 → 1.43 | 39 |
| 1B | 48.6 → 52.1 (1.07×) | 44.5 → 33.1 | 185 → 219 (1.18×) | 3.71 → 3.17 |  |
| 1.5B | 31.8 → 35.5 (1.12×) | 62.8 → 45.1 | 119 → 141 (1.19×) | 5.73 → 4.87 | 29 |
| 2B | 22.4 → 27.3 (1.22×) | 46.7 → 57.1 ¹ | 87.8 → 106 (1.21×) | 7.85 → 6.51 | 24 |

¹ Sparse with a larger micro-batch.

"""
RUN_LEGEND = """Whole training runs through accelerate launch, from weights whose sparsity has \
settled; medians over the second half of the steps. In brackets above 1 is better: \
`tokens_per_ms`, `memory_GiB` (peak of rank 0) and `mJ_per_token` (training, all GPUs) against the \
dense run of the same GPUs; `tokens_per_ms_a_gpu` against one GPU alone with the same kernels \
(scaling efficiency); `loader` (tokens/ms) against what training takes. `resume_difference`: after \
SIGKILL and resume, the largest relative difference of a step's loss from an uninterrupted run; \
`resume_seconds`: from the kill until the same step was done again.

"""
MODEL_LEGEND = """A settled model's whole forward on one GPU, M tokens of held-out text, both \
sides compiled: `sparsellm.accelerate`, in brackets against dense; above 1 is better. \
`difference`: of the logits, from dense. The paper's figures stand under `train`.

"""
CHECKPOINT_LEGEND = """Saving and loading while training, all ranks together. `blocked`: what a \
step waits for (`blocked_first`: with the making of pinned host memory); `save`: until the \
checkpoint is published, in the background; `step_while`: a step of then, in brackets a step \
without over it; \
`verify`: all hashes; `load`: to where the tensors belong, the files in the page cache.

"""
ORDER_LEGEND = """Neurons that 64 tokens fire between them, the mean over blocks, where the tokens \
of a micro-batch are sorted by a key, counted on a recorded trace (no GPU); in brackets above 1 is \
better, against the order of the text. Keys in hindsight know what they sort for. "16 early": the \
first 16 positions of a sequence come first; `…`: so too.

"""
LAYER_LEGEND = """Each FFN of a trained model on what its own model hands it, M tokens of held-out \
text: `sparsellm.accelerate`, in brackets dense under torch.compile over ours; above 1 is better.

"""
# Of these, a row of the table is a case, with a column a metric; else a row is a metric.
LEGENDS = {
    "checkpoint": CHECKPOINT_LEGEND,
    "dispatch": DISPATCH_LEGEND,
    "ffn_decode": FFN_LEGEND,
    "ffn_forward": FFN_LEGEND,
    "ffn_train": TRAIN_LEGEND,
    "layer_forward": LAYER_LEGEND,
    "model_forward": MODEL_LEGEND,
    "token_order": ORDER_LEGEND,
    "train": RUN_LEGEND + PAPER,
}
# Keys of a case that tell what it turned out to be, not which one it is.
OUTCOMES = ("measured_nnz", "union_64", "path")


@dataclass(frozen=True)
class Measurement:
    """What a benchmark returns; `append` adds where, when and how it was taken."""

    bench: str
    case: dict[str, Any]
    metric: str
    value: float
    unit: str
    baseline: float | None = None  # the other side's value, same run, same inputs
    ratio: float | None = None  # stated by the benchmark: which way round is in its docstring


def append(
    measurements: list[Measurement],
    path: Path = RESULTS,
    taken: Mapping[str, str] | None = None,
) -> None:
    """Adds one line a measurement. ``taken`` says where and how, if not here and now."""
    context = {
        "hardware": hardware(),
        "commit": commit() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(),
    } | dict(taken or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for measurement in measurements:
            file.write(json.dumps(asdict(measurement) | context) + "\n")


def _command() -> str:
    """The command line without ``--record FILE``, which decides nothing that is measured."""
    words = sys.argv[1:]
    if "--record" in words:
        index = words.index("--record")
        del words[index : index + 2]
    return shlex.join(["sparsellm", *words])


def hardware() -> str:
    """GPU name and count, else the CPU's architecture and cores."""
    import torch

    if torch.cuda.is_available():
        return (
            f"{torch.cuda.device_count()}× {torch.cuda.get_device_name()}, {os.cpu_count()} cores"
        )
    return f"{platform.machine()}, {os.cpu_count()} cores"


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """All recorded lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a table a benchmark, with the newest of equal cases on the same hardware."""
    by_bench: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in newest(records):
        by_bench[record["bench"]].append(record)
    parts = ["# Results\n\nMade from results.jsonl by `sparsellm bench table`; do not edit.\n"]
    for bench, records_of in sorted(by_bench.items()):
        layout = _row_a_case if bench in LEGENDS else _row_a_metric
        header, rows = layout(records_of)
        parts.append(f"\n## {bench}\n\n| {' | '.join(header)} |\n|{' --- |' * len(header)}\n")
        parts += [f"| {' | '.join(_cell(cell) for cell in cells)} |\n" for cells in rows]
        commands = dict.fromkeys(record["command"] for record in records_of)
        legend = LEGENDS.get(bench, "")
        parts.append("\n" + legend + "\n".join(f"`{command}`  " for command in commands) + "\n")
    return "".join(parts)


def newest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each benchmark, case, metric and hardware, at the place of the first."""
    found = {}
    for record in records:
        which = (record["bench"], _key(record["case"]), record["metric"], record["hardware"])
        found[which] = record
    return list(found.values())


def _key(case: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in case.items() if k not in OUTCOMES}, sort_keys=True)


def _case_keys(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for record in records for key in record["case"]))


def _row_a_metric(records: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    keys = _case_keys(records)
    fields = ["metric", "value", "unit", "baseline", "ratio", "hardware", "commit"]
    rows = [[r["case"].get(key) for key in keys] + [r[field] for field in fields] for r in records]
    return keys + fields, rows


def _row_a_case(records: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Cases in order of their keys; a cell is the value, the ratio and the baseline."""
    keys = _case_keys(records)
    metrics = list(dict.fromkeys(record["metric"] for record in records))
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_case[_key(record["case"]), record["hardware"]].append(record)

    def order(members: list[dict[str, Any]]) -> list[tuple[int, Any]]:
        values = [members[0]["case"].get(key) for key in keys]
        return [(0, 0) if v is None else (1 + isinstance(v, str), v) for v in values]

    rows = []
    for members in sorted(by_case.values(), key=order):
        cells = {record["metric"]: _with_ratio(record) for record in members}
        commits = ", ".join(dict.fromkeys(record["commit"] for record in members))
        case = [members[0]["case"].get(key) for key in keys]
        rows.append([*case, *map(cells.get, metrics), members[0]["hardware"], commits])
    return [*keys, *metrics, "hardware", "commit"], rows


def _with_ratio(record: dict[str, Any]) -> str:
    value = _cell(record["value"])
    if record["ratio"] is None:
        return value
    return f"{value} ({record['ratio']:.2f}× of {_cell(record['baseline'])})"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
