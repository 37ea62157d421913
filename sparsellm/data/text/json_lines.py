"""JSON Lines shards: read by byte ranges, or as a stream if they are compressed.

Only the text field is parsed, so other fields may have any type in each line, and errors name their
line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparsellm.data.text.network import one_line, open_file
from sparsellm.data.text.readers import (
    Block,
    NotUtf8Error,
    Rows,
    ShardReader,
    damaged,
    decode,
    which_text,
)
from sparsellm.data.text.shards import Shard

BLOCK_BYTES = 4 * 2**20
_ONE_OBJECT = 'each line must be an object with the text of one document, such as {"text": "…"}'
_ONE_ARRAY = f"{_ONE_OBJECT}; `jq -c '.[]' FILE > FILE.jsonl` makes lines of an array"
_ONE_FILE = (
    "a file that is one object has no documents; give only the files that have, or if each object "
    "is spread over lines, `jq -c . FILE > FILE.jsonl` puts it on one"
)


class JsonLinesReader(ShardReader):
    """An uncompressed file: block i has the lines that start in the i-th `BLOCK_BYTES` bytes."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._file = open_file(shard.url)
        self.num_blocks = -(-self._file.seek(0, 2) // BLOCK_BYTES)

    def read(self, block: int) -> _Lines:
        begin, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        return _Lines(self._lines(begin, end), self._shard, lambda: self._line_number(begin))

    def _lines(self, begin: int, end: int) -> bytes:
        # A line belongs to the block that has its first byte.
        if begin == 0:
            self._file.seek(0)
        else:
            self._file.seek(begin - 1)
            begin += len(self._file.readline()) - 1
        if begin >= end:
            return b""
        data = self._file.read(end - begin)
        if data and not data.endswith(b"\n"):
            data += self._file.readline()
        return data

    def _line_number(self, begin: int) -> int:
        """Number of the first line of a block, from 1; counted only for an error message."""
        self._file.seek(0)
        before = sum(
            self._file.read(BLOCK_BYTES).count(b"\n") for _ in range(0, begin, BLOCK_BYTES)
        )
        # The line that contains the byte before `begin` belongs to the earlier block.
        self._file.seek(max(begin - 1, 0))
        return before + (2 if begin and self._file.read(1) != b"\n" else 1)

    def close(self) -> None:
        self._file.close()


class JsonLinesStream(ShardReader):
    """A compressed file: a block is the next lines of about `BLOCK_BYTES` bytes."""

    num_blocks = None

    def __init__(self, shard: Shard) -> None:
        assert shard.compression
        self._shard = shard
        self._source = open_file(shard.url)
        self._stream = pa.CompressedInputStream(self._source, shard.compression)
        self._rest = b""
        self._line = 1
        self._ended = False
        self.next_block = 0

    def read(self, block: int) -> _Lines | None:
        assert block == self.next_block
        data = self._next_data()
        if not data:
            return None
        first = self._line
        self._line += data.count(b"\n")
        self.next_block += 1
        return _Lines(data, self._shard, lambda: first)

    def _next_data(self) -> bytes:
        """Whole lines of at least `BLOCK_BYTES` bytes in total; the last may be shorter."""
        parts: list[bytes | memoryview[int]] = [self._rest]
        size, end, part = len(self._rest), -1, b""
        while not self._ended and (size < BLOCK_BYTES or end < 0):
            part = self._read()
            self._ended = not part
            end = part.rfind(b"\n")
            parts.append(part)
            size += len(part)
        if end < 0:  # the last line has no line feed
            self._rest = b""
            return b"".join(parts)
        self._rest = part[end + 1 :]
        parts[-1] = memoryview(part)[: end + 1]
        return b"".join(parts)

    def _read(self) -> bytes:
        try:
            return self._stream.read(BLOCK_BYTES)
        except (pa.ArrowException, OSError, EOFError) as error:
            raise damaged(f"{self._shard.url}: after line {self._line - 1} it", error) from error

    def close(self) -> None:
        self._source.close()


class _Lines(Block):
    """A block of lines, which are found and parsed only when their documents are read.

    The reader of a stream passes many lines that belong to other lanes.
    """

    def __init__(self, data: bytes, shard: Shard, first_line: Callable[[], int]) -> None:
        self._data, self._shard, self._first_line = data, shard, first_line
        self.num_bytes = len(data)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The position of each line feed; `splitlines` would also split at other characters."""
        ends = np.flatnonzero(np.frombuffer(self._data, np.uint8) == ord("\n"))
        if self._data and not self._data.endswith(b"\n"):
            ends = np.append(ends, len(self._data))
        return ends

    def __len__(self) -> int:
        return len(self._ends)

    def documents(self, rows: Rows) -> list[str]:
        ends = self._ends[rows].tolist()
        begins = np.where(rows > 0, self._ends[rows - 1] + 1, 0).tolist()
        return [
            self._text(row, self._data[begin:end])
            for row, begin, end in zip(rows.tolist(), begins, ends, strict=True)
        ]

    def _text(self, row: int, line: bytes) -> str:
        field = self._shard.text_field
        if not line.strip():
            return ""
        try:
            document = json.loads(decode(line, "surrogatepass"))
        except NotUtf8Error as error:
            raise self._error(row, str(error)) from error
        except (ValueError, RecursionError) as error:
            remedy = "repair or remove the line"
            if line.lstrip().startswith(b"["):
                remedy = _ONE_ARRAY
            elif line.strip() == b"{":
                remedy = _ONE_FILE
            raise self._error(row, f" is not JSON ({one_line(error)}); {remedy}") from error
        if isinstance(document, dict) and field in document:
            text = document[field]
            if isinstance(text, str | None):
                return text or ""
        raise self._error(row, _why_no_text(document, field))

    def _error(self, row: int, problem: str) -> ValueError:
        return ValueError(f"{self._shard.url}: line {self._first_line() + row}{problem}")


def _why_no_text(document: object, field: str) -> str:
    """The end of a sentence about a line."""
    if not isinstance(document, dict):
        remedy = _ONE_ARRAY if isinstance(document, list) else _ONE_OBJECT
        return f" is of type {type(document).__name__}, not an object; {remedy}"
    texts = [key for key, value in document.items() if isinstance(value, str) and key != field]
    named = which_text(texts, list(document), field, "repair or remove the line")
    if field not in document:
        return f" has no key {field!r}; {named}"
    return f": {field!r} is of type {type(document[field]).__name__}, not text; {named}"
