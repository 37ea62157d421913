"""One measured number is one line of ``benchmarks/results.jsonl``; tables are made from it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results.jsonl")
TABLE = Path("benchmarks/RESULTS.md")


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


def append(measurements: list[Measurement], path: Path = RESULTS) -> None:
    """Adds one line a measurement."""
    context = {
        "hardware": hardware(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(),
    }
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


def commit() -> str:
    """The commit measured: SPARSELLM_COMMIT (a copy without its history), else git's HEAD."""
    named = os.environ.get("SPARSELLM_COMMIT")
    if named:
        return named
    head = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return head.stdout.strip() or "unknown"


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """All recorded lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a table a benchmark, newest of equal cases last, as in the file."""
    by_bench: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_bench[record["bench"]].append(record)
    parts = ["# Results\n\nMade from results.jsonl by `sparsellm bench table`; do not edit.\n"]
    for bench, rows in sorted(by_bench.items()):
        keys = list(dict.fromkeys(key for row in rows for key in row["case"]))
        header = [*keys, "metric", "value", "unit", "baseline", "ratio", "hardware", "commit"]
        parts.append(f"\n## {bench}\n\n| {' | '.join(header)} |\n|{' --- |' * len(header)}\n")
        for row in rows:
            cells = [row["case"].get(key) for key in keys]
            cells += [row[key] for key in header[len(keys) :]]
            parts.append(f"| {' | '.join(_cell(cell) for cell in cells)} |\n")
        commands = dict.fromkeys(row["command"] for row in rows)
        parts.append("\n" + "\n".join(f"`{command}`  " for command in commands) + "\n")
    return "".join(parts)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
