"""The documents of a shard by blocks: random access where the format has it, else a stream.

A block is a Parquet row group, the lines that begin within a range of bytes of a JSON Lines file, a
table of a stream, or a group of source files. `datasets` reads Arrow files; benchmarks/LOG.md says
why it does not read the others.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from sparsellm.data.block_types import Block, Rows, ShardReader
from sparsellm.data.json_lines import JsonLinesReader, JsonLinesStream
from sparsellm.data.parquet import ParquetReader
from sparsellm.data.retry import is_transient, one_line, with_retries
from sparsellm.data.shards import Shard
from sparsellm.data.table_stream import TableStream
from sparsellm.data.text_files import open_file
from sparsellm.data.token_shards import TokenReader


def open_shard(shard: Shard) -> ShardReader:
    """Opens a shard.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is damaged or has no such text field.
        ConnectionError: the network failed until `retry` gave up.
    """
    if shard.format == "parquet":
        return ParquetReader(shard)
    if shard.format == "jsonl":
        return JsonLinesStream(shard) if shard.compression else JsonLinesReader(shard)
    if shard.format == "tokens":
        return TokenReader(shard)
    if shard.format == "sources":
        return SourcesReader(shard)
    return TableStream(shard)


class SourcesReader:
    """Plain text files, one document each, in one block."""

    num_blocks = 1
    next_block = None

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def read(self, block: int) -> Block:
        return _Files(self._shard)

    def close(self) -> None:
        """Nothing is open."""


class _Files:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._shard.members)

    def documents(self, rows: Rows) -> list[str]:
        urls = (self._shard.members[row] for row in rows.tolist())
        return [with_retries(partial(self._read, url), url) for url in urls]

    def _read(self, url: str) -> str:
        with open_file(url) as file:
            try:
                compression = self._shard.compression
                source = pa.CompressedInputStream(file, compression) if compression else file
                return str(source.read().decode("utf-8-sig"))  # without a byte order mark
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{url} is not UTF-8 text ({error}); convert it (iconv -f LATIN1 -t UTF-8, or "
                    "what it is in), or take it out of the corpus"
                ) from error
            except (pa.ArrowException, OSError, EOFError) as error:
                if is_transient(error):
                    raise
                raise ValueError(
                    f"{url} is damaged ({one_line(error)}); fetch it again, or take it out of the "
                    "corpus"
                ) from error
