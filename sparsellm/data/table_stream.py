"""Arrow files through `datasets` and CSV files through pandas, as a stream of tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa

from sparsellm.data.block_types import TextColumn, check_text_column
from sparsellm.data.retry import is_transient, one_line, with_retries
from sparsellm.data.shards import Shard
from sparsellm.data.text_files import open_steady

ROWS_PER_BLOCK = 1024

Result = TypeVar("Result")


class TableStream:
    """One file, read from front to back."""

    num_blocks = None

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.next_block = 0
        self._tables = self._named(lambda: with_retries(self._open, shard.url))

    def _open(self) -> Iterator[pa.Table]:
        if self._shard.format == "csv":
            return self._open_csv()
        import datasets

        # It reads the beginning of the file for its columns.
        stream = datasets.load_dataset(
            self._shard.format,
            data_files={"train": [self._shard.url]},
            split="train",
            streaming=True,
        )
        return iter(stream.with_format("arrow").iter(batch_size=ROWS_PER_BLOCK))

    def _open_csv(self) -> Iterator[pa.Table]:
        import pandas as pd

        # Every field is text. By default pandas would take digits for numbers and NA for a missing
        # value, and the first fields for names of rows that have more fields than the header.
        frames = pd.read_csv(
            open_steady(self._shard.url),
            dtype=str,
            na_filter=False,
            index_col=False,
            chunksize=ROWS_PER_BLOCK,
        )
        while True:
            try:
                with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
                    frame = next(frames, None)
            except pd.errors.ParserWarning as warning:  # pandas would leave out fields
                raise ValueError("its rows have more fields than its header") from warning
            if frame is None:
                return
            yield pa.Table.from_pandas(frame, preserve_index=False)

    def read(self, block: int) -> TextColumn | None:
        assert block == self.next_block
        table = self._named(lambda: next(self._tables, None))
        if table is None:
            return None
        self.next_block += 1
        check_text_column(table.schema, self._shard)
        return TextColumn(
            table.column(self._shard.text_field),
            f"{self._shard.url}: rows from {block * ROWS_PER_BLOCK}",
            self._shard.text_field,
        )

    def _named(self, action: Callable[[], Result]) -> Result:
        """The result of an action, whose errors name the shard."""
        where = f"{self._shard.url}, after row {self.next_block * ROWS_PER_BLOCK}"
        try:
            return action()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self._shard.url} is missing; restore it, or take it out of the corpus"
            ) from error
        except Exception as error:  # each builder has exceptions of its own
            if is_transient(error):
                raise ConnectionError(
                    f"{where}: the connection broke ({one_line(error)}); the run can be resumed"
                ) from error
            remedy = "fetch the file again, or take it out of the corpus"
            if self._shard.format == "csv":
                remedy = f"put texts with commas or line breaks in quotes; {remedy}"
            raise ValueError(
                f"{where}: damaged, or not of format {self._shard.format} ({one_line(error)}); "
                f"{remedy}"
            ) from error

    def close(self) -> None:
        """The file is closed with the iterator over it."""
        del self._tables
