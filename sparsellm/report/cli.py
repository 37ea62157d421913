"""``sparsellm report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_report_parser(commands: Any) -> None:
    """Adds ``report`` to the ``sparsellm`` command."""
    parser = commands.add_parser(
        "report",
        help="write one HTML page of a run, or of several overlaid; needs no network",
        description="Writes one self-contained HTML page of one run or of several overlaid, and "
        "the PNGs of `sparsellm plot` into each run's folder.",
    )
    parser.add_argument(
        "run_paths", type=Path, nargs="*", metavar="RUN", help="folder such as runs/debug"
    )
    parser.add_argument(
        "--sweep",
        type=Path,
        metavar="DIR",
        help="a sweep's folder such as runs/quality: report its runs with table and figures (SVG)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="file of the page (default: RUN/report.html; for several runs ./report.html)",
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from sparsellm.report.collect import without_records
    from sparsellm.report.page import write_report
    from sparsellm.report.sweep_report import write_sweep_report

    empty = {path: without_records(path) for path in options.run_paths}
    if None in empty.values():  # paths of `runs/*` without records; if all are, the error says so
        for path, why in empty.items():
            if why is not None:
                print(f"skipped {path}: {why}", file=sys.stderr)
                options.run_paths.remove(path)
    if bool(options.run_paths) == bool(options.sweep):
        raise ValueError("give run folders, or one sweep: --sweep runs/quality")
    if options.sweep:
        written = write_sweep_report(options.sweep, options.out)
    else:
        written = write_report(options.run_paths, options.out)
    for path in written:
        print(path)
