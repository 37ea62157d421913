"""``sparsellm stop``."""

import argparse
import time
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.1


def add_stop_parser(commands: Any) -> None:
    """Adds ``stop`` to the ``sparsellm`` command."""
    parser = commands.add_parser(
        "stop",
        help="ask a training run to save a checkpoint and end, and wait until it has",
        description="Asks a run that is training on this host to save a checkpoint after its "
        "current step and to end, on all ranks. Waits until it has ended. The same training "
        "command resumes the run.",
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="folder such as runs/debug")
    parser.add_argument(
        "--no-wait", action="store_true", help="return at once, before the run has ended"
    )
    parser.set_defaults(run=_stop)


def _stop(options: argparse.Namespace) -> None:
    from sparsellm.runs.lock import ask_to_stop, lives  # pydantic: other commands answer sooner

    process = ask_to_stop(options.run_path)
    print(f"asked process {process.pid} to stop: it saves after this step, then ends", flush=True)
    if options.no_wait:
        return
    while lives(process):
        time.sleep(_POLL_SECONDS)
    print(f"{options.run_path} has stopped; the command that trained it resumes it")
