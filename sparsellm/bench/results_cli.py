"""``sparsellm bench table`` and ``plots``: tables and figures of the records."""

from __future__ import annotations

import argparse
import difflib
from collections import Counter
from typing import Any


def add_results_parsers(names: Any) -> None:
    """Adds ``table`` and ``plots`` to the benchmarks."""
    table = names.add_parser(
        "table",
        help="benchmarks/RESULTS.md from results.jsonl; --all BENCH prints every record",
        description="Writes benchmarks/RESULTS.md from benchmarks/results.jsonl; --all prints the "
        "newest records of a benchmark instead.",
    )
    table.add_argument(
        "--all",
        nargs="?",
        const="",
        metavar="BENCH",
        help="print all cases of this benchmark; without a name, list the benchmarks",
    )
    table.set_defaults(run=_table)
    plots = names.add_parser(
        "plots",
        help="benchmarks/figures/*.svg from results.jsonl: the newest record of each case",
        description="Draws benchmarks/figures/*.svg from benchmarks/results.jsonl.",
    )
    plots.set_defaults(run=_plots)


def _table(options: argparse.Namespace) -> None:
    from sparsellm.bench import record, results_page
    from sparsellm.bench.listing import listing

    records = record.read()
    if options.all is None:
        text = results_page.results_page(records)
        results_page.PAGE.write_text(text, encoding="utf-8", newline="\n")
        print(results_page.PAGE)
        return
    count = Counter(line["bench"] for line in records)
    if not options.all:
        print("\n".join(f"{name:24} {number:6,} records" for name, number in sorted(count.items())))
    elif options.all in count:
        print(listing([line for line in records if line["bench"] == options.all]), end="")
    else:
        close = difflib.get_close_matches(options.all, count, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"--all {options.all}: {record.RESULTS} has no such benchmark{meant}")


def _plots(options: argparse.Namespace) -> None:
    from sparsellm.bench import figures, record

    drawn = figures.draw_all(record.read())
    figures.FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        (figures.FOLDER / name).write_text(text, encoding="utf-8", newline="\n")
        print(figures.FOLDER / name)
    for name in figures.FIGURES:
        if f"{name}.svg" not in drawn:
            print(f"skipped {name}.svg: {record.RESULTS} has no records for it")
