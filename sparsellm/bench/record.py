"""Records of measurements: one number per line of ``benchmarks/results.jsonl``."""

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsellm.paths import usable_cores
from sparsellm.runs.telemetry.session import commit

RESULTS = Path("benchmarks/results.jsonl")


@dataclass(frozen=True)
class Measurement:
    """One measured number; `append` adds where, when and how it was measured."""

    bench: str
    case: dict[str, Any]
    metric: str
    value: float
    unit: str
    # That of the other configuration in the same run, on the same inputs.
    baseline: float | None = None
    ratio: float | None = None  # set by the benchmark, whose docstring says which way round
    # Of a value that was measured over seconds of the same work: its 10th and 90th percentile
    # (p10, p90), and the GPU's watts and sm_mhz meanwhile. Older records were short bursts.
    sustained: Mapping[str, float] | None = None
    baseline_sustained: Mapping[str, float] | None = None
    # Keys of `append`'s context, if it was not measured in this process.
    context: Mapping[str, str] = field(default_factory=dict)


def append(measurements: Sequence[Measurement], path: Path = RESULTS) -> None:
    """Appends one line per measurement, with where, when and how it was measured."""
    defaults = {
        "hardware": hardware(),
        "commit": commit() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for measurement in measurements:
            line = asdict(measurement)
            context = line.pop("context")
            line = {k: v for k, v in line.items() if v is not None or "sustained" not in k}
            record = line | defaults | context
            # As short as it can be: the records of years stay in one file.
            file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


def _command() -> str:
    """The command line without ``--record FILE``, which does not influence what is measured."""
    script, *words = sys.argv
    if "--record" in words:
        index = words.index("--record")
        del words[index : index + 2]
    path = Path(script)
    alone = path.suffix == ".py" and path.name != "__main__.py"  # which `python -m sparsellm` runs
    return shlex.join([*(["python", script] if alone else ["sparsellm"]), *words])


def hardware() -> str:
    """Count and name of the GPUs, or the CPU's architecture and cores."""
    import torch

    name = platform.machine()
    if torch.cuda.is_available():
        name = f"{torch.cuda.device_count()}× {torch.cuda.get_device_name()}"
    return f"{name}, {usable_cores()} cores"


def row(measurements: Sequence[Measurement]) -> str:
    """The printed line of one case: each metric with its spread, ratio and baseline."""
    case = " ".join(f"{key}={_number(value)}" for key, value in measurements[0].case.items())
    return f"{measurements[0].bench} {case}: {', '.join(map(_figure, measurements))}"


def _figure(m: Measurement) -> str:
    notes = []
    if m.sustained:
        notes.append(f"{_number(m.sustained['p10'])} to {_number(m.sustained['p90'])}")
        if "watts" in m.sustained:
            notes.append(f"{m.sustained['watts']:.0f} W at {m.sustained['sm_mhz']:,.0f} MHz")
    if m.ratio is not None and m.baseline is not None:
        notes.append(f"{m.ratio:.2f}× of {_number(m.baseline)}")
    unit = "" if m.metric == m.unit else f" {m.unit}"
    return f"{m.metric} {_number(m.value)}{unit}" + (f" ({'; '.join(notes)})" if notes else "")


def _number(value: Any) -> str:
    """Four significant digits; a large number has all: 12,345,678 and not 1.235e+07."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1e4 else f"{value:,.4g}"
