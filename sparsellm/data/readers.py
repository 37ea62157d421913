"""Documents of a shard by blocks: random access, retries for what passes, names for what does not.

A block is a Parquet row group, `LINES_PER_BLOCK` lines of JSONL, or a whole group of source files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Protocol

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sparsellm.data.corpus import Shard
from sparsellm.data.retry import is_transient, one_line, with_retries

LINES_PER_BLOCK = 1024

Rows = NDArray[np.int64]


class ShardReader(Protocol):
    """An open shard."""

    block_sizes: list[int]  # rows of each block

    def read_rows(self, block: int, rows: Rows) -> list[str]:
        """The documents at ``rows`` of a block, in that order; a null is an empty document."""
        ...


def open_shard(shard: Shard) -> ShardReader:
    """Opens a shard.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is damaged or has no such text field.
        ConnectionError: the network failed `MAX_ATTEMPTS` times.
    """
    if shard.format == "parquet":
        return ParquetReader(shard)
    if shard.format == "jsonl":
        return JsonlReader(shard)
    return SourcesReader(shard)


class ParquetReader:
    """A Parquet file through fsspec; only the text column is read."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._file = with_retries(self._open, shard.url)
        metadata = self._file.metadata
        field = shard.text_field
        if field not in self._file.schema_arrow.names:
            raise ValueError(
                f"{shard.url}: no column {field!r}; it has "
                f"{', '.join(self._file.schema_arrow.names)}. Set text_field in the corpus's YAML"
            )
        kind = self._file.schema_arrow.field(field).type
        texts = (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_null,
        )
        if not any(is_text(kind) for is_text in texts):
            raise ValueError(f"{shard.url}: column {field!r} holds {kind}, not text")
        self.block_sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(fsspec.open(self._shard.url, "rb").open())
        except pa.ArrowInvalid as error:
            raise _damaged(self._shard, error) from error

    def read_rows(self, block: int, rows: Rows) -> list[str]:
        def read() -> pa.ChunkedArray:
            try:
                # Arrow would start a thread a core in every worker; the workers are the threads.
                table = self._file.read_row_group(
                    block, columns=[self._shard.text_field], use_threads=False
                )
                return table.column(0)
            except pa.ArrowInvalid as error:
                raise _damaged(self._shard, error) from error
            except OSError as error:
                # pyarrow reports corrupt pages as OSError too; what the network does is retried.
                if is_transient(error):
                    self._file = self._open()
                    raise
                raise _damaged(self._shard, error) from error

        # Only this consumer's rows become Python strings: where shards are divided by rows, the
        # others' are most of the block. Arrow's `take` would join the chunks of a column, which
        # fails above 2 GiB.
        column = with_retries(read, self._shard.url)
        return [self._text(column, block, row) for row in rows.tolist()]

    def _text(self, column: pa.ChunkedArray, block: int, row: int) -> str:
        try:
            return column[row].as_py() or ""
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._shard.url}: row {row} of row group {block}: {self._shard.text_field!r} is "
                f"not UTF-8 ({error}); mend or remove the row, or take the shard out of the corpus"
            ) from error


class JsonlReader:
    """A JSONL file; one pass at opening finds where its blocks begin."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._starts: list[int] = []
        self.block_sizes: list[int] = []
        self._scan()

    def _scan(self) -> None:
        with self._open() as file:
            position = 0
            for number, line in enumerate(file):
                if number % LINES_PER_BLOCK == 0:
                    self._starts.append(position)
                    self.block_sizes.append(0)
                self.block_sizes[-1] += 1
                position += len(line)

    def _open(self) -> IO[bytes]:
        return with_retries(lambda: fsspec.open(self._shard.url, "rb").open(), self._shard.url)

    def read_rows(self, block: int, rows: Rows) -> list[str]:
        def read() -> list[bytes]:
            with self._open() as file:
                file.seek(self._starts[block])
                return [file.readline() for _ in range(self.block_sizes[block])]

        first = block * LINES_PER_BLOCK + 1
        lines = with_retries(read, self._shard.url)
        return [self._text(lines[row], first + row) for row in rows.tolist()]

    def _text(self, line: bytes, number: int) -> str:
        if not line.strip():
            return ""
        field = self._shard.text_field
        try:
            document = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self._shard.url}: line {number} is not JSON ({error}); mend or remove the line"
            ) from error
        if not isinstance(document, dict) or not isinstance(document.get(field), str | None):
            raise ValueError(f"{self._shard.url}: line {number}: {field!r} is not text")
        if field not in document:
            raise ValueError(
                f"{self._shard.url}: line {number} has no key {field!r}; set text_field in the "
                "corpus's YAML"
            )
        return document[field] or ""


class SourcesReader:
    """Plain text files, one document each, in one block."""

    def __init__(self, shard: Shard) -> None:
        self._members = shard.members
        self.block_sizes = [len(shard.members)]

    def read_rows(self, block: int, rows: Rows) -> list[str]:
        paths = (Path(self._members[row]) for row in rows.tolist())
        return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _damaged(shard: Shard, error: Exception) -> ValueError:
    return ValueError(
        f"{shard.url} is damaged or no Parquet file ({one_line(error)}); fetch it again, "
        "or take it out of the corpus"
    )
