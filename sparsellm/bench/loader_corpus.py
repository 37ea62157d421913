"""A corpus's text written again in another format, for `sparsellm bench loader --format`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sparsellm.data.corpus import Corpus, load_corpus
from sparsellm.data.held_out import documents_in_order
from sparsellm.data.tokenize_corpus import tokenize

FORMATS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "tokens")
ROW_GROUP = 1000  # documents: as the hub's files have them
_COMPRESSIONS = {"jsonl": None, "jsonl.gz": "gzip", "jsonl.zst": "zstd"}


def rewrite(
    corpus: Corpus, kind: str, folder: Path, tokenizer: str, *, num_shards: int, copies: int
) -> Corpus:
    """Writes the training text ``copies`` times over ``num_shards`` files below ``folder``.

    Args:
        corpus: of text.
        kind: one of `FORMATS`; Parquet as on the hub, snappy and `ROW_GROUP` documents a row group.
        folder: a new one, or one of an earlier call, whose files are taken as they are.
        tokenizer: of ``tokens``.
        num_shards: files.
        copies: how often each document is written.

    Raises:
        FileNotFoundError, ValueError: as reading does.
    """
    if kind == "tokens":
        text = rewrite(corpus, "parquet", folder, tokenizer, num_shards=num_shards, copies=copies)
        return load_corpus(str(tokenize(text, tokenizer, folder / "tokens", num_workers=1)))
    own = folder / kind
    if not (own / "done").is_file():
        own.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(_Writer(own / f"{index:05d}.{kind}", kind))
                for index in range(num_shards)
            ]
            texts = _texts(corpus, copies)
            turn = 0
            while batch := list(islice(texts, ROW_GROUP)):
                writers[turn % num_shards].write(batch)
                turn += 1
        (own / "done").touch()
    return load_corpus("local", files=[str(own / f"*.{kind}")])


def _texts(corpus: Corpus, copies: int) -> Iterator[str]:
    for _ in range(copies):
        for text in chain.from_iterable(documents_in_order(corpus.train)):
            if not isinstance(text, str):
                raise ValueError(f"corpus {corpus.name} is tokenised: --format needs text")
            yield text


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
