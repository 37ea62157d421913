"""Text files that hold many documents with a separator between them, read by byte ranges."""

from __future__ import annotations

import io
from functools import cached_property
from typing import IO

from sparsellm.data.text.json_lines import BLOCK_BYTES
from sparsellm.data.text.network import open_file
from sparsellm.data.text.readers import Block, NotUtf8Error, Rows, ShardReader, decode, read_whole
from sparsellm.data.text.shards import Shard


class SeparatedReader(ShardReader):
    """Block i has the documents that begin in the i-th `BLOCK_BYTES` bytes of a file.

    A compressed file is held in memory.
    """

    def __init__(self, shard: Shard) -> None:
        assert shard.separator
        self._url, self._separator = shard.url, shard.separator.encode()
        if shard.compression:
            self._file: IO[bytes] = io.BytesIO(read_whole(shard.url, shard.compression))
        else:
            self._file = open_file(shard.url)
        self._size = self._file.seek(0, 2)
        self._gap = (0, 0)  # between these places no document begins but at the second one
        self.num_blocks = -(-self._size // BLOCK_BYTES)

    def read(self, block: int) -> _Documents:
        begin, end = (self._next(place * BLOCK_BYTES) for place in (block, block + 1))
        self._file.seek(begin)
        return _Documents(self._file.read(end - begin), self._separator, self._url)

    def _next(self, place: int) -> int:
        """Where the first document at or after a place begins; the end of the file if none does."""
        if place == 0:
            return 0
        if self._gap[0] <= place <= self._gap[1]:
            return self._gap[1]
        # The separator before it may begin earlier.
        at, rest = max(place - len(self._separator), 0), b""
        self._file.seek(at)
        while data := self._file.read(BLOCK_BYTES):
            rest += data
            if (index := rest.find(self._separator)) >= 0:
                self._gap = (place, at + index + len(self._separator))
                return self._gap[1]
            at += len(rest)
            rest = rest[-len(self._separator) + 1 :] if len(self._separator) > 1 else b""
            at -= len(rest)
        self._gap = (place, self._size)
        return self._size

    def close(self) -> None:
        self._file.close()


class _Documents(Block):
    def __init__(self, data: bytes, separator: bytes, url: str) -> None:
        self._data, self._separator, self._url = data, separator, url
        self.num_bytes = len(data)

    @cached_property
    def _parts(self) -> list[bytes]:
        parts = self._data.split(self._separator)
        return parts if parts[-1] else parts[:-1]  # it ends with a separator, or is empty

    def __len__(self) -> int:
        return len(self._parts)

    def documents(self, rows: Rows) -> list[str]:
        try:  # line breaks around the separator are not of the documents
            return [decode(self._parts[row]).strip("\r\n") for row in rows.tolist()]
        except NotUtf8Error as error:
            raise ValueError(f"{self._url}{error}") from error
