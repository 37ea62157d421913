"""Writes the report: the page and the PNGs of each run."""

from __future__ import annotations

from pathlib import Path

from sparsellm.arguments import check_out
from sparsellm.report.collect import read_runs
from sparsellm.report.page import render_page
from sparsellm.report.plots import plot_run
from sparsellm.runs.files import write_atomically

REPORT_FILE = "report.html"


def write_report(run_paths: list[Path], out: Path | None = None) -> list[Path]:
    """Writes the page of these runs and the PNGs of each; returns the files, the page first.

    Args:
        run_paths: run folders; duplicates are ignored.
        out: the page; by default ``report.html`` in the run's folder, or in the working
            directory if there are several runs.

    Raises:
        FileNotFoundError: a folder is not a run.
        ValueError: a run has no record yet, a file of it is damaged, or the page cannot be written.
    """
    if out is not None:
        check_out(out)
    runs = read_runs(run_paths)
    if out is None:
        out = runs[0].path / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE)
    page = render_page(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page)
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error}); name another file: --out") from error
    return [out, *(png for run in runs for png in _plots(run.path))]


def _plots(run_path: Path) -> list[Path]:
    try:
        return plot_run(run_path)
    except OSError as error:
        raise ValueError(
            f"{run_path / 'plots'} cannot be written ({error}); copy the run to a folder of yours"
        ) from error
