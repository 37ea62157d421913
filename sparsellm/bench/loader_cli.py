"""Options of ``sparsellm bench loader``."""

from __future__ import annotations

import argparse
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
    parser.set_defaults(run=_loader)
    return parser


def _loader(options: argparse.Namespace) -> None:
    from sparsellm.bench import loader_rate
    from sparsellm.recipe import load_recipe

    recipe = load_recipe(options.recipe)
    for num_workers in options.num_workers:
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
        )
        output.report(found, options.record)
