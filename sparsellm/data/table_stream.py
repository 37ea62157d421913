"""Arrow and CSV files through `datasets`, as a stream of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa

from sparsellm.data.block_types import TextColumn, check_text_column
from sparsellm.data.retry import is_transient, one_line, with_retries
from sparsellm.data.shards import Shard

ROWS_PER_BLOCK = 1024

Result = TypeVar("Result")


class TableStream:
    """One file, read from front to back by `datasets`' builder of its format."""

    num_blocks = None

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.next_block = 0
        self._tables = self._named(lambda: with_retries(self._open, shard.url))

    def _open(self) -> Iterator[pa.Table]:
        import datasets

        # It reads the beginning of the file for its columns.
        stream = datasets.load_dataset(
            self._shard.format,
            data_files={"train": [self._shard.url]},
            split="train",
            streaming=True,
        )
        return iter(stream.with_format("arrow").iter(batch_size=ROWS_PER_BLOCK))

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
        """What an action gives; its error says of which shard it is."""
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
            raise ValueError(
                f"{where}: damaged, or not of format {self._shard.format} ({one_line(error)}); "
                "fetch the file again, or take it out of the corpus"
            ) from error

    def close(self) -> None:
        """The file is closed with the iterator over it."""
        del self._tables
