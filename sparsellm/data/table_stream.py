"""Arrow and CSV files through `datasets`, as a stream of tables."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from sparsellm.data.block_types import TextColumn, check_text_column
from sparsellm.data.retry import is_transient, one_line, with_retries
from sparsellm.data.shards import Shard

ROWS_PER_BLOCK = 1024


class TableStream:
    """One file, read from front to back by `datasets`' builder of its format."""

    num_blocks = None

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._tables = self._open()
        self.next_block = 0

    def _open(self) -> Iterator[pa.Table]:
        import datasets

        stream = with_retries(
            lambda: datasets.load_dataset(
                self._shard.format,
                data_files={"train": [self._shard.url]},
                split="train",
                streaming=True,
            ),
            self._shard.url,
        )
        return iter(stream.with_format("arrow").iter(batch_size=ROWS_PER_BLOCK))

    def read(self, block: int) -> TextColumn | None:
        assert block >= self.next_block
        table = None
        while self.next_block <= block:
            table = self._next()
            if table is None:
                return None
            self.next_block += 1
        assert table is not None
        check_text_column(table.schema, self._shard)
        return TextColumn(
            table.column(self._shard.text_field),
            f"{self._shard.url}: rows from {block * ROWS_PER_BLOCK}",
            self._shard.text_field,
        )

    def _next(self) -> pa.Table | None:
        where = f"{self._shard.url}, after row {self.next_block * ROWS_PER_BLOCK}"
        try:
            return next(self._tables, None)
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
