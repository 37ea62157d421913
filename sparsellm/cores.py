"""How many CPU cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that the process is bound to (by ``taskset`` or Slurm, say), else all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
