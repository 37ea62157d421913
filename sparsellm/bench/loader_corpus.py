"""Rewrites a corpus's text in another format, for `sparsellm bench loader --format`."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparsellm.cores import usable_cores
from sparsellm.data.corpus import Corpus, load_corpus
from sparsellm.data.held_out import documents_in_order
from sparsellm.data.tokenize_corpus import tokenize
from sparsellm.data.workers import begin_worker, worker_context

FORMATS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "tokens")
ROW_GROUP = 1000  # documents per row group, as in the hub's files
_COMPRESSIONS = {"jsonl": None, "jsonl.gz": "gzip", "jsonl.zst": "zstd"}


def rewrite(
    corpus: Corpus,
    kind: str,
    folder: Path,
    tokenizer: str,
    *,
    num_shards: int,
    copies: int,
    document_characters: int | None = None,
) -> Corpus:
    """Writes the training text ``copies`` times into ``num_shards`` files below ``folder``.

    Args:
        corpus: a corpus of text.
        kind: one of `FORMATS`; Parquet is written as on the hub: snappy, `ROW_GROUP` documents per
            row group.
        folder: a new folder, or that of an earlier call, whose files are used as they are.
        tokenizer: tokenizer of the format ``tokens``.
        num_shards: number of files.
        copies: how often each document is written.
        document_characters: cut documents into parts of so many characters; None: no cut.

    Raises:
        FileNotFoundError, ValueError: the corpus cannot be read.
    """
    processes = usable_cores()
    options: dict[str, Any] = {"num_shards": num_shards, "copies": copies}
    options["document_characters"] = document_characters
    if kind == "tokens":
        text = rewrite(corpus, "parquet", folder, tokenizer, **options)
        return load_corpus(str(tokenize(text, tokenizer, folder / "tokens", processes)))
    own = folder / kind
    if not (own / "done").is_file():
        own.mkdir(parents=True, exist_ok=True)
        work = partial(_write, corpus, kind, own, copies, document_characters)
        num_parts = min(processes, num_shards)
        parts = [range(part, num_shards, num_parts) for part in range(num_parts)]
        with ProcessPoolExecutor(num_parts, worker_context(), begin_worker) as pool:
            list(pool.map(work, parts, repeat(num_shards)))
        (own / "done").touch()
    return load_corpus("local", files=[str(own / f"*.{kind}")])


def _write(  # noqa: PLR0917 - multiprocessing passes them by position
    corpus: Corpus, kind: str, folder: Path, copies: int, most: int | None, own: range, of: int
) -> None:
    """Writes the shards ``own`` of ``of``; every process reads all of the text."""
    with contextlib.ExitStack() as stack:
        writers = {
            index: stack.enter_context(_Writer(folder / f"{index:05d}.{kind}", kind))
            for index in own
        }
        texts = _texts(corpus, copies, most)
        for turn in itertools.count():
            batch = list(islice(texts, ROW_GROUP))
            if not batch:
                break
            if turn % of in writers:
                writers[turn % of].write(batch)


def _texts(corpus: Corpus, copies: int, most: int | None) -> Iterator[str]:
    for _ in range(copies):
        for text in chain.from_iterable(documents_in_order(corpus.train)):
            if not isinstance(text, str):
                raise ValueError(f"corpus {corpus.name} is tokenised: --format needs text")
            size = most or max(len(text), 1)
            for first in range(0, len(text), size):
                yield text[first : first + size]


class _Writer:
    def __init__(self, path: Path, kind: str) -> None:
        self._kind = kind
        if kind == "parquet":
            schema = pa.schema([("text", pa.string())])
            self._parquet = pq.ParquetWriter(path, schema, compression="snappy")
        else:
            self._lines = pa.output_stream(str(path), compression=_COMPRESSIONS[kind])

    def write(self, texts: list[str]) -> None:
        if self._kind == "parquet":
            self._parquet.write_table(pa.table({"text": texts}), row_group_size=ROW_GROUP)
        else:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            self._lines.write(lines.encode())

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        (self._parquet if self._kind == "parquet" else self._lines).close()
