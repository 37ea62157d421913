"""``sparsellm report``."""

import argparse
import sys
from pathlib import Path
from typing import Any

from sparsellm.arguments import check_out, model_path
from sparsellm.waiting import waiting


def add_report_parser(commands: Any) -> None:
    """Adds ``report`` to the ``sparsellm`` command."""
    parser = commands.add_parser(
        "report",
        help="write one HTML page about a run, or about several runs; needs no network",
        description="Writes one self-contained HTML page about one run, or about several runs.",
    )
    text = "folder such as runs/debug"
    parser.add_argument("run_paths", type=model_path, nargs="*", metavar="RUN", help=text)
    text = "report the runs of a sweep, such as runs/quality, with a table and a figure"
    parser.add_argument("--sweep", type=Path, metavar="DIR", help=text)
    text = "page to write (default: RUN/report.html, or ./report.html for several runs)"
    parser.add_argument("--out", type=Path, metavar="FILE.html", help=text)
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    if bool(options.run_paths) == bool(options.sweep):
        raise ValueError("give run folders, or one sweep: --sweep runs/quality")
    if options.out is not None:
        check_out(options.out, begins="<!doctype html>")
    with waiting("writing the report"):
        _write(options)


def _write(options: argparse.Namespace) -> None:
    from sparsellm.report.collect import without_records
    from sparsellm.report.page import write_report
    from sparsellm.report.sweep_report import write_sweep_report

    paths = options.run_paths
    empty = {path: why for path in paths if (why := without_records(path))}
    if len(empty) < len(paths):  # else the error below says what is missing
        for path, why in empty.items():
            print(f"skipped {path}: {why}", file=sys.stderr)
        paths = [path for path in paths if path not in empty]
    if options.sweep:
        print(*write_sweep_report(options.sweep, options.out), sep="\n")
    else:
        print(write_report(paths, options.out))
