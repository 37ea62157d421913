"""``sparsellm data …``: fetch, tokenize and inspect a corpus."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsellm.arguments import check_out, positive_int
from sparsellm.paths import usable_cores

if TYPE_CHECKING:  # imported where they run: `sparsellm --help` is quick
    from sparsellm.data.text.corpus import Corpus


def add_data_parser(commands: Any) -> None:
    """Adds ``data`` and its actions to the ``sparsellm`` command."""
    data = commands.add_parser("data", help="fetch, tokenize or inspect a corpus")
    actions = data.add_subparsers(metavar="ACTION")

    def add(name: str, run: Any, summary: str, description: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            name, help=summary, description=description
        )
        parser.add_argument("corpus", metavar="CORPUS", help="a corpus of data/, or a YAML file")
        parser.set_defaults(run=run)
        return parser

    fetch = add(
        "fetch",
        _fetch,
        "download a corpus from the Hub",
        "Downloads a corpus from the Hugging Face Hub at its pinned revision, and writes a corpus "
        "file for data.corpus. The same command continues after an interruption.",
    )
    fetch.add_argument("out", type=Path, metavar="DIR", help="folder to write")
    text = "number of training files to fetch (default: all)"
    fetch.add_argument("--shards", type=positive_int, help=text)
    text = "parallel downloads (default: 8)"
    fetch.add_argument("--workers", type=positive_int, default=8, help=text)

    tokenize = add(
        "tokenize",
        _tokenize,
        "write a corpus as shards of token ids",
        "Writes a corpus as token ids in Megatron-LM's format (.bin, .idx), and a corpus file for "
        "data.corpus. Training then reads the same stream of tokens without tokenising again. "
        "The same command continues after an interruption.",
    )
    tokenize.add_argument("out", type=Path, metavar="DIR", help="folder to write")
    _add_source_arguments(tokenize)
    text = "parallel processes (default: one per core)"
    tokenize.add_argument("--workers", type=positive_int, default=usable_cores(), help=text)

    inspect = add(
        "inspect",
        _inspect,
        "count documents, tokens and duplicates, and show samples",
        "Counts documents and tokens, shows the lengths of documents, and counts exact "
        "duplicates and held-out documents that are in the training text.",
    )
    _add_source_arguments(inspect)
    text = (
        "number of documents to count in each split (default: all). A hash picks held-out "
        "documents: to find N of them where 1%% is held out, it reads about 100 N"
    )
    inspect.add_argument("--limit", type=positive_int, help=text)
    inspect.add_argument(
        "--samples", type=int, default=3, help="number of documents to show (default: 3)"
    )


def _add_source_arguments(parser: argparse.ArgumentParser) -> None:
    text = "globs or folders that replace the corpus's files"
    parser.add_argument("--files", nargs="+", help=text)
    text = "globs or folders that replace the corpus's held-out files"
    parser.add_argument("--validation-files", nargs="+", help=text)
    parser.add_argument("--text-field", help="column or key that holds the text")
    text = "text that separates the documents of a .txt file"
    parser.add_argument("--document-separator", metavar="TEXT", help=text)
    text = "gpt2 (default), bytes or hf:ID_OR_PATH"
    parser.add_argument("--tokenizer", default="gpt2", help=text)


def _corpus(options: argparse.Namespace) -> Corpus:
    from sparsellm.data.text.corpus import single_corpus
    from sparsellm.recipe.sections import DataConfig

    keys = ("corpus", "files", "validation_files", "text_field", "document_separator")
    return single_corpus(DataConfig(**{key: getattr(options, key) for key in keys}))


def _fetch(options: argparse.Namespace) -> None:
    from sparsellm.data.fetch import fetch

    check_out(options.out, is_folder=True)
    written = fetch(options.corpus, options.out, options.shards, options.workers)
    print(f"fetched; train on it with --set data.corpus={written}")


def _tokenize(options: argparse.Namespace) -> None:
    from sparsellm.data.tokenize_corpus import tokenize

    check_out(options.out, is_folder=True)
    written = tokenize(_corpus(options), options.tokenizer, options.out, options.workers)
    print(
        f"tokenised; train on it with --set data.corpus={written} "
        f"--set data.tokenizer={options.tokenizer}"
    )


def _inspect(options: argparse.Namespace) -> None:
    from sparsellm.data.inspect_corpus import inspect
    from sparsellm.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    print(inspect(_corpus(options), tokenizer, options.limit, options.samples))
