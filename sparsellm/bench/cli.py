"""``sparsellm bench …``: measures and prints figures, and with ``--record`` saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsellm.bench.ffn_cli import add_ffn_parsers
from sparsellm.bench.loader_cli import add_loader_parser
from sparsellm.bench.model_cli import add_model_parsers
from sparsellm.bench.train_cli import add_train_parser


def add_bench_parser(commands: Any) -> None:
    """Adds ``bench`` and its benchmarks to the ``sparsellm`` command."""
    bench = commands.add_parser("bench", help="measure speed; results under benchmarks/")
    names = bench.add_subparsers(required=True, metavar="BENCHMARK")
    ffn, model = add_ffn_parsers(names), add_model_parsers(names)
    for parser in (*ffn, *model, add_loader_parser(names), add_train_parser(names)):
        parser.add_argument(
            "--record", type=Path, metavar="FILE", help="append to FILE (benchmarks/results.jsonl)"
        )
