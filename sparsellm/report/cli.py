"""``sparsellm report`` and ``sparsellm plot``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sparsellm.waiting import waiting


def add_report_parsers(commands: Any) -> None:
    """Adds ``report`` and ``plot`` to the ``sparsellm`` command."""
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
        help="report the runs of a sweep, such as runs/quality, with a table and figures",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="page to write (default: RUN/report.html, or ./report.html for several runs)",
    )
    parser.set_defaults(run=_report)

    plot = commands.add_parser(
        "plot",
        help="write PNG plots of a run",
        description="Writes plots/training.png and plots/sparsity.png into the run's folder.",
    )
    plot.add_argument("run_path", type=Path, metavar="RUN", help="folder such as runs/debug")
    plot.set_defaults(run=_plot)


@waiting("writing the report")
def _report(options: argparse.Namespace) -> None:
    from sparsellm.report.collect import without_records
    from sparsellm.report.page import write_report
    from sparsellm.report.sweep_report import write_sweep_report

    empty = {path: without_records(path) for path in options.run_paths}
    if None in empty.values():  # else the error below says what is missing
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


def _plot(options: argparse.Namespace) -> None:
    from sparsellm.report.plots import plot_run

    for path in plot_run(options.run_path):
        print(path)
