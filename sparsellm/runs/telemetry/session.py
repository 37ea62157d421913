"""The session record: a description of the process that trains a run."""

import functools
import os
import platform
import secrets
import socket
import subprocess
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib import metadata

import psutil
import torch

from sparsellm import __version__
from sparsellm.ffn.kernels.compiler.gpu_architecture import device_name
from sparsellm.paths import bundled, usable_cores
from sparsellm.runs.telemetry.records import Parent, SessionRecord

_PACKAGES = ("torch", "accelerate", "transformers", "cupy-cuda13x", "cupy-cuda12x")
_run_began = ContextVar("run_began", default=0.0)  # seconds since 1970; 0: when the process did


def begin_run() -> None:
    """The next session begins now, not with the process: a sweep's worker trains several runs."""
    _run_began.set(time.time())


def this_session(
    step: int,
    tokens: int,
    ranks: int,
    device: torch.device,
    *,
    parent: Parent | None = None,
    init_from: Parent | None = None,
    changes: list[str] | None = None,
    texts: dict[str, str] | None = None,
) -> SessionRecord:
    """The session of this process, or of its present run, which begins at a step."""
    started = _run_began.get() or psutil.Process().create_time()
    return SessionRecord(
        step=step,
        tokens=tokens,
        id=secrets.token_hex(4),
        started=datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        started_at=started,
        startup_seconds=max(time.time() - started, 0.0),
        ranks=ranks,
        device=device_name(device),
        cores=usable_cores(),
        host=socket.gethostname(),
        pid=os.getpid(),
        commit=commit(),
        versions={"sparsellm": __version__, "python": platform.python_version()}
        | versions(*_PACKAGES)
        | ({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        parent=parent,
        init_from=init_from,
        changes=changes or [],
        texts=texts or {},
    )


@functools.cache
def versions(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    installed = [name for name in packages if any(metadata.distributions(name=name))]
    return {name: metadata.version(name) for name in installed}


@functools.cache
def commit() -> str:
    """The commit of this code: SPARSELLM_COMMIT (for a copy without .git), else git's HEAD.

    Empty where neither is known.
    """
    root = bundled("recipes").parent
    named = os.environ.get("SPARSELLM_COMMIT", "")
    if named or not (root / ".git").exists():
        return named
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip()
