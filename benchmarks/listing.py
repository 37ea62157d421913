"""Every record of a benchmark as one wide table, which `make_tables.py --all` prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from results import case_text, newest

FFN_LEGEND = """Times (ms of one FFN) and energy: in brackets baseline over value, the baseline \
being dense under torch.compile; above 1 is better. Rates: in brackets the share of what a large \
matmul (TFLOP/s) or copy (GB/s, of weights) reached in the same run; for ours only the \
work that the pattern requires is counted: the whole gate, and of the other matrices the neurons \
that fire. `difference`: of ours from dense eager.

"""
TRAIN_LEGEND = """Forward and backward of one FFN in training, with the gradients of x and all \
weights: ours on the sparse path, with statistics and L1; in brackets baseline over value, the \
baseline being the plain formula under torch.compile; above 1 is better. `forward_ms`: the \
forward alone. `memory_MiB`: kept from forward to backward, without x, y and weights; \
`peak_MiB`: the peak, with y and all gradients. `host_ms`: how long the host takes to queue \
both stages. `difference`: the largest difference from dense eager among y, the L1 sum and the \
gradients.

"""
RUN_LEGEND = """Whole training runs through accelerate launch, from weights whose sparsity has \
settled; medians over the second half of the steps. In brackets above 1 is better: \
`tokens_per_ms`, `memory_GiB` (peak of rank 0) and `mJ_per_token` (training, all GPUs) against the \
dense run of the same GPUs; `tokens_per_ms_a_gpu` against one GPU alone with the same kernels \
(scaling efficiency).

"""
MODEL_LEGEND = """A settled model's whole forward on one GPU, M tokens of held-out text, both \
sides compiled: `sparsellm.accelerate`, in brackets against dense; above 1 is better. \
`difference`: of the logits, from dense.

"""
LAYER_LEGEND = """Each FFN of a trained model on its inputs in that model, M tokens of held-out \
text: `sparsellm.accelerate`, in brackets dense under torch.compile over ours; above 1 is better.

"""
# In the tables of these, a row is a case and a column a metric; in others, a row is a metric.
LEGENDS = {
    "ffn_decode": FFN_LEGEND,
    "ffn_forward": FFN_LEGEND,
    "ffn_train": TRAIN_LEGEND,
    "layer_forward": LAYER_LEGEND,
    "model_forward": MODEL_LEGEND,
    "train": RUN_LEGEND,
}


def listing(records: list[dict[str, Any]]) -> str:
    """Markdown: a table per benchmark, with the newest record of each case and hardware."""
    by_bench: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in newest(records):
        by_bench[record["bench"]].append(record)
    return "\n".join(_section(bench, found) for bench, found in sorted(by_bench.items()))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table that ends with a line break; numbers have up to four digits."""
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    lines += [f"| {' | '.join(map(cell, cells))} |" for cells in rows]
    return "\n".join(lines) + "\n"


def _section(bench: str, records: list[dict[str, Any]]) -> str:
    header, rows = (_row_a_case if bench in LEGENDS else _row_a_metric)(records)
    commands = dict.fromkeys(record["command"] for record in records)
    parts = [f"## {bench}\n", markdown_table(header, rows), LEGENDS.get(bench, "").rstrip("\n")]
    parts.append("\n".join(f"`{command}`  " for command in commands))
    return "\n".join(part for part in parts if part) + "\n"


def _case_keys(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for record in records for key in record["case"]))


def _row_a_metric(records: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    keys = _case_keys(records)
    fields = ["metric", "value", "unit", "baseline", "ratio", "hardware", "commit"]
    rows = [[r["case"].get(key) for key in keys] + [r[field] for field in fields] for r in records]
    return keys + fields, rows


def _row_a_case(records: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Cases sorted by their keys; a cell has the value, the ratio and the baseline."""
    keys = _case_keys(records)
    metrics = list(dict.fromkeys(record["metric"] for record in records))
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_case[case_text(record["case"]), record["hardware"]].append(record)

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
    value = cell(record["value"])
    if record["ratio"] is None:
        return value
    return f"{value} ({record['ratio']:.2f}× of {cell(record['baseline'])})"


def cell(value: Any) -> str:
    """The text of a value: up to four digits."""
    if value is None:
        return ""
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
