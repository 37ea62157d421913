"""Prints and records the figures of a benchmark's command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported only where needed, to keep `sparsellm --help` fast
    import torch

    from sparsellm.bench.ffn_sweep import Skipped
    from sparsellm.bench.record import Measurement


def gpu(bench: str) -> torch.device:
    """The current CUDA device.

    Raises:
        ValueError: there is no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"bench {bench} measures GPU kernels and needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def report(
    found: list[Measurement], path: Path | None, taken: Mapping[str, str] | None = None
) -> None:
    """Prints figures and records them in ``--record``'s file; ``taken``: see `record.append`."""
    from sparsellm.bench import record

    for m in found:
        print(line(m), flush=True)
    if path:
        record.append(found, path, taken)


def follow(
    measured: Iterable[list[Measurement] | Skipped],
    rows: Callable[[list[Measurement]], list[str]],
    path: Path | None,
) -> None:
    """Prints figures case by case, and records them in ``--record``'s file.

    Raises:
        ValueError: no case was measured.
    """
    from sparsellm.bench import record

    num_measured = 0
    for found in measured:
        if not isinstance(found, list):
            print(f"skipped: {found.case}: {found.why}", flush=True)
            continue
        num_measured += any(m.metric == "ms" for m in found)
        print("\n".join(rows(found)), flush=True)
        if path:
            record.append(found, path)
    if not num_measured:
        raise ValueError("no case was measured; the reasons are above")


def line(m: Measurement) -> str:
    """The printed line of a figure: value, ratio and case."""
    ratio = "" if m.ratio is None else f"  {m.ratio:.2f}× of {m.baseline:.4g}"
    case = " ".join(f"{key}={value}" for key, value in m.case.items())
    value = f"{m.value:,.0f}" if abs(m.value) >= 1e5 else f"{m.value:,.6g}"  # not 1.2e+06
    return f"{m.bench} {m.metric} {value} {m.unit}{ratio}  [{case}]"
