"""Blocks of documents, which the readers of shards return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparsellm.data.shards import Shard
from sparsellm.data.tokenizer import Tokens

Rows = NDArray[np.int64]


class Block(Protocol):
    """Some documents of a shard."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the block holds in memory."""
        ...

    def __len__(self) -> int: ...

    def documents(self, rows: Rows) -> list[str] | list[Tokens]:
        """The documents at ``rows``, in that order; a null is an empty document.

        Raises:
            ValueError: a row is damaged; names shard and row.
        """
        ...


class ShardReader(Protocol):
    """An open shard."""

    @property
    def num_blocks(self) -> int | None:
        """Number of blocks; None for a stream, which is read from front to back."""
        ...

    @property
    def next_block(self) -> int | None:
        """The only block that a stream can read now; None if any block can be read."""
        ...

    def read(self, block: int) -> Block | None:
        """Reads a block; None past the end of a stream.

        Raises:
            FileNotFoundError, ValueError, ConnectionError: the shard is gone or damaged, or the
                network failed; the message names the shard and the place.
        """
        ...

    def close(self) -> None:
        """Closes its file."""
        ...


class TextColumn:
    """A block of an Arrow column of text.

    Args:
        column: strings, or null.
        where: its name in errors, such as ``a.parquet: row group 3``.
        field: name of the column.
    """

    def __init__(self, column: pa.ChunkedArray, where: str, field: str) -> None:
        self._column, self._where, self._field = column, where, field
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
                f"{self._where}, row {row}: {self._field!r} is not UTF-8 ({error}); repair or "
                "remove the row, or take the shard out of the corpus"
            ) from error


def check_text_column(schema: pa.Schema, shard: Shard) -> None:
    """Checks that a table has the shard's text field, with text in it.

    Raises:
        ValueError: it does not; the message lists the existing columns.
    """
    field = shard.text_field
    if (count := schema.names.count(field)) != 1:
        has = f"{count} columns" if count else "no column"
        raise ValueError(f"{shard.url}: {has} {field!r}; {what_it_has(schema.names)}")
    kind = schema.field(field).type
    is_text: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_null,
    )
    if pa.types.is_dictionary(kind):  # each text once, and its number in each row
        kind = kind.value_type
    if not any(check(kind) for check in is_text):
        raise ValueError(
            f"{shard.url}: column {field!r} holds {kind}, not text; {what_it_has(schema.names)}"
        )


def what_it_has(names: list[str]) -> str:
    """The end of an error message: the first columns or keys, and how to name the right one.

    Names are shortened: in a file without a header they are the text of its first line.
    """
    shown = [name if len(name) <= 40 else f"{name[:40]}…" for name in names[:20]]
    shown += ["…"] if len(names) > 20 else []
    return f"it has {', '.join(shown)}. Name its text with data.text_field"
