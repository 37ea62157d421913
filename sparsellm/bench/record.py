"""Records of measurements: one number per line of ``benchmarks/results.jsonl``."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sparsellm.cores import usable_cores
from sparsellm.runs.files import read_json_lines
from sparsellm.runs.session import commit

RESULTS = Path("benchmarks/results.jsonl")


@dataclass(frozen=True)
class Measurement:
    """One measured number; `append` adds where, when and how it was measured."""

    bench: str
    case: dict[str, Any]
    metric: str
    value: float
    unit: str
    baseline: float | None = None  # the other side's value in the same run, on the same inputs
    ratio: float | None = None  # set by the benchmark, whose docstring says which way round


def append(
    measurements: list[Measurement],
    path: Path = RESULTS,
    taken: Mapping[str, str] | None = None,
) -> None:
    """Appends one line per measurement; ``taken`` says where and how, if not in this process."""
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
    """The command line without ``--record FILE``, which does not influence what is measured."""
    words = sys.argv[1:]
    if "--record" in words:
        index = words.index("--record")
        del words[index : index + 2]
    return shlex.join(["sparsellm", *words])


def hardware() -> str:
    """Count and name of the GPUs, or the CPU's architecture and cores."""
    import torch

    if torch.cuda.is_available():
        return (
            f"{torch.cuda.device_count()}× {torch.cuda.get_device_name()}, {usable_cores()} cores"
        )
    return f"{platform.machine()}, {usable_cores()} cores"


def taken_by(sessions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Where and when a run was trained, for `append`: from the last session that it recorded."""
    if not sessions:
        return {}
    session = sessions[-1]
    device = "CPU" if session["device"] == "cpu" else session["device"]
    where = device if device == "CPU" and session["ranks"] == 1 else f"{session['ranks']}× {device}"
    if "cores" in session:  # not in those of older versions
        where += f", {session['cores']} cores"
    found = {"hardware": where, "date": session["started"][:10]}
    return found | ({"commit": session["commit"]} if session["commit"] else {})


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """All recorded lines."""
    return read_json_lines(path, _Line, "delete that line, or restore the file")


class _Line(BaseModel):
    model_config = ConfigDict(extra="allow")

    bench: str
    case: dict[str, Any]
    metric: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    hardware: str
    commit: str
    command: str
