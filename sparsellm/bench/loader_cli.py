"""Options of ``sparsellm bench loader``."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from sparsellm.arguments import positive_int
from sparsellm.bench import output


def add_loader_parser(names: Any) -> argparse.ArgumentParser:
    """Adds ``loader`` to the benchmarks; the caller adds ``--record``."""
    parser: argparse.ArgumentParser = names.add_parser(
        "loader", help="rate of the data loader, tokens per second"
    )
    parser.add_argument("--corpus", default="sample", help="name in data/, or a YAML file")
    parser.add_argument("--files", nargs="*", help="globs that replace the corpus's files")
    parser.add_argument(
        "--recipe",
        default="0.5b",
        help="recipe that gives the defaults of --tokenizer and others (default: 0.5b)",
    )
    parser.add_argument("--tokenizer", help="gpt2, bytes or hf:ID_OR_PATH")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--num-ranks", type=positive_int, default=1, help="training processes")
    parser.add_argument("--context-length", type=positive_int, help="tokens")
    parser.add_argument("--micro-batch-size", type=positive_int, help="sequences")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring, each time")
    parser.add_argument(
        "--resume-after",
        type=int,
        default=0,
        metavar="TOKENS",
        help="tokens of all ranks after which to resume",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        choices=("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "tokens"),
        default=[None],
        help="rewrite the text in this format first and read that (default: as it is)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="folder that keeps the files of --format for further calls",
    )
    parser.add_argument(
        "--shards", type=positive_int, default=16, help="number of files of --format"
    )
    parser.add_argument(
        "--copies", type=positive_int, default=1, help="how often --format repeats the text"
    )
    parser.add_argument(
        "--document-characters",
        type=positive_int,
        help="cut documents to so many characters in --format; FineWeb's have 3,000 on average",
    )
    parser.set_defaults(run=_loader)
    return parser


def _loader(options: argparse.Namespace) -> None:
    from sparsellm.bench import loader_rate
    from sparsellm.recipe import load_recipe

    recipe = load_recipe(options.recipe)
    for kind, num_workers in itertools.product(options.format, options.num_workers):
        found = loader_rate.run(
            corpus=options.corpus,
            files=options.files,
            tokenizer=options.tokenizer or recipe.data.tokenizer,
            num_workers=num_workers,
            num_ranks=options.num_ranks,
            context_length=options.context_length or recipe.model.context_length,
            micro_batch_size=options.micro_batch_size or recipe.micro_batch_sequences,
            seconds=options.seconds,
            resume_after=options.resume_after,
            kind=kind,
            folder=options.work,
            num_shards=options.shards,
            copies=options.copies,
            document_characters=options.document_characters,
        )
        output.report(found, options.record)
