"""Parquet shards by row group, through fsspec."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from sparsellm.data.block_types import TextColumn, check_text_column
from sparsellm.data.retry import is_transient, one_line, with_retries
from sparsellm.data.shards import Shard
from sparsellm.data.text_files import open_file


class ParquetReader:
    """A Parquet file; only the text column is read, and its pages' checksums are verified.

    The file is opened, and its footer read, once; `datasets` does both for every row group.
    """

    next_block = None

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._file = with_retries(self._open, shard.url)
        check_text_column(self._file.schema_arrow, shard)
        metadata = self._file.metadata
        self.num_blocks = metadata.num_row_groups
        self._sizes = [metadata.row_group(i).num_rows for i in range(self.num_blocks)]

    def read(self, block: int) -> TextColumn:
        where = f"{self._shard.url}: row group {block}"

        def read() -> pa.ChunkedArray:
            try:
                # Arrow would start a thread per core in every worker; workers are parallel already.
                table = self._file.read_row_group(
                    block, columns=[self._shard.text_field], use_threads=False
                )
                # By its name: `columns` also takes the dotted names of a struct's fields.
                column = table.column(self._shard.text_field)
                if len(column) != self._sizes[block]:
                    raise pa.ArrowInvalid(f"{len(column)} rows for {self._sizes[block]}")
                column.validate()  # offsets that lead outside the data would crash
                return column
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                # pyarrow reports corrupt pages as OSError, too; network errors are retried.
                if is_transient(error):
                    self._file = self._open()
                    raise
                raise _damaged(where, error) from error

        return TextColumn(with_retries(read, where), where, self._shard.text_field)

    def close(self) -> None:
        self._file.close()

    def _open(self) -> pq.ParquetFile:
        file = open_file(self._shard.url)
        try:
            return pq.ParquetFile(file, page_checksum_verification=True)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if is_transient(error):
                raise
            raise _damaged(self._shard.url, error) from error


def _damaged(where: str, error: Exception) -> ValueError:
    return ValueError(
        f"{where} is damaged or not Parquet ({one_line(error)}); fetch the file again, or take it "
        "out of the corpus"
    )
