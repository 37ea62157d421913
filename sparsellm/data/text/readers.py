"""The documents of a shard by blocks: random access where the format has it, else a stream.

A block is a row group of Parquet, the lines of JSON that begin within a range of bytes
(json_lines.py), or a whole text file. Tokens (token_shards.py) have the blocks of their text.
benchmarks/LOG.md says why `datasets` does not read them.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sparsellm.data.text.network import one_line, open_file
from sparsellm.data.text.shards import Shard
from sparsellm.data.tokenizer import Tokens

Rows = NDArray[np.int64]


class Block(ABC):
    """Some documents of a shard."""

    num_bytes: int  # in memory

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def documents(self, rows: Rows) -> list[str] | list[Tokens]:
        """The documents at ``rows``, in that order; a null is an empty document.

        Raises:
            ValueError: a row is damaged; names shard and row.
        """


class ShardReader(ABC):
    """An open shard."""

    num_blocks: int | None  # None for a stream, which is read from front to back
    next_block: int | None = None  # the only one that a stream can read now

    @abstractmethod
    def read(self, block: int) -> Block | None:
        """Reads a block; None past the end of a stream.

        Raises:
            FileNotFoundError, ValueError, ConnectionError: the shard is gone or damaged, or the
                network failed; the message names the shard and the place.
        """

    def close(self) -> None:  # noqa: B027
        """Closes its file, if it keeps one open."""


def damaged(where: str, error: Exception) -> Exception:
    """What to raise for an ``error`` met in reading; network faults already say what failed."""
    if isinstance(error, ConnectionError | FileNotFoundError):
        return error
    return ValueError(
        f"{where} is damaged, or not in the format that its name says ({one_line(error)}); fetch "
        "the file again, or take it out of the corpus"
    )


class NotUtf8Error(ValueError):
    """Text is in another encoding; the message is the end of a sentence about it."""


def decode(data: bytes, errors: str = "strict") -> str:
    """UTF-8 text, without a byte order mark.

    Raises:
        NotUtf8Error: it is in another encoding.
    """
    try:
        text, why = data.decode("utf-8-sig", errors), "it has many zero bytes"
    except UnicodeDecodeError as error:
        text, why = None, str(error)
    # In UTF-16 half of the bytes of English are zero.
    utf16 = data.startswith(_MARKS_OF_UTF16) or 4 * data.count(0) > len(data)
    if text is None or utf16:
        name = "UTF-16" if utf16 else "LATIN1, or what it is in,"
        raise NotUtf8Error(
            f" is not UTF-8 text ({why}); convert it (iconv -f {name} -t UTF-8), or take it out of "
            "the corpus"
        )
    return text


_MARKS_OF_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_whole(url: str, compression: str | None) -> bytes:
    """The content of a file, decompressed; raises as `ShardReader.read`."""
    with open_file(url) as file:
        try:
            source = pa.CompressedInputStream(file, compression) if compression else file
            return bytes(source.read())
        except (pa.ArrowException, OSError, EOFError) as error:
            raise damaged(url, error) from error


def which_text(of_text: Sequence[str], names: Sequence[str], field: str, remedy: str) -> str:
    """The end of an error message: the columns or keys that hold text, and how to name one.

    ``field`` is the one that was looked for. Where none holds text: all ``names``, and the
    ``remedy``. Names are shortened: in a file without a header they are the text of its first line.
    """
    shown = [name if len(name) <= 40 else f"{name[:40]}…" for name in (of_text or names)[:20]]
    shown += ["…"] if len(of_text or names) > 20 else []
    if of_text:
        of_data = f"in files for --data, rename it to {field!r}"  # they have no key of their own
        return f"it has {', '.join(shown)}. Name its text with data.text_field; {of_data}"
    return f"it has no text ({', '.join(shown)}); {remedy}"


class TextReader(ShardReader, Block):
    """Plain text files, one document each: a shard is its only block."""

    num_blocks = 1
    num_bytes = 0

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def read(self, block: int) -> Block:
        return self

    def __len__(self) -> int:
        return len(self._shard.members)

    def documents(self, rows: Rows) -> list[str]:
        return [self._read(self._shard.members[row]) for row in rows.tolist()]

    def _read(self, url: str) -> str:
        try:
            return decode(read_whole(url, self._shard.compression))
        except NotUtf8Error as error:
            raise ValueError(f"{url}{error}") from error


class ParquetReader(ShardReader):
    """A Parquet file by row group; only its text column is read, and its checksums are verified.

    The file is opened, and its footer read, once; `datasets` does both for every row group.
    """

    def __init__(self, shard: Shard) -> None:
        self._url, self._field = shard.url, shard.text_field
        source = open_file(shard.url)
        try:
            self._file = pq.ParquetFile(source, page_checksum_verification=True)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise damaged(shard.url, error) from error
        _check_text_column(self._file.schema_arrow, shard)
        metadata = self._file.metadata
        self.num_blocks = metadata.num_row_groups
        self._sizes = [metadata.row_group(i).num_rows for i in range(self.num_blocks)]

    def read(self, block: int) -> Block:
        where = f"{self._url}: row group {block}"
        try:
            # Arrow would start a thread per core in every worker; workers are parallel already.
            table = self._file.read_row_group(block, columns=[self._field], use_threads=False)
            # By its name: `columns` also takes the dotted names of a struct's fields.
            column = table.column(self._field)
            if len(column) != self._sizes[block]:
                raise pa.ArrowInvalid(f"{len(column)} rows for {self._sizes[block]}")
            column.validate()  # offsets that lead outside the data would crash
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            # pyarrow reports corrupt pages as OSError, too.
            raise damaged(where, error) from error
        return TextColumn(column, where)

    def close(self) -> None:
        self._file.close(force=True)


class TextColumn(Block):
    def __init__(self, column: pa.ChunkedArray, where: str) -> None:
        self._column, self._where = column, where
        self.num_bytes = column.nbytes

    def __len__(self) -> int:
        return len(self._column)

    def documents(self, rows: Rows) -> list[str]:
        # Only these rows become Python strings. Arrow's `take` would join the chunks of a column,
        # which fails above 2 GiB.
        return [self._text(row) for row in rows.tolist()]

    def _text(self, row: int) -> str:
        try:
            return self._column[row].as_py() or ""
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._where}, row {row} is not UTF-8 text ({error}); repair or remove the row, "
                "or take the shard out of the corpus"
            ) from error


def _check_text_column(schema: pa.Schema, shard: Shard) -> None:
    field = shard.text_field
    texts = [column.name for column in schema if _holds_text(column.type)]
    other_columns = [name for name in texts if name != field]
    rest = which_text(other_columns, schema.names, field, "take it out of the corpus")
    if (count := schema.names.count(field)) != 1:
        has = f"{count} columns" if count else "no column"
        raise ValueError(f"{shard.url}: {has} {field!r}; {rest}")
    if field not in texts:
        raise ValueError(
            f"{shard.url}: column {field!r} holds {schema.field(field).type}, not text; {rest}"
        )


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):  # each text once, and its number in each row
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view(), pa.null())
