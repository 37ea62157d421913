"""The blocks of a worker's shards, open once and shared by all of its lanes."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sparsellm.data.text.json_lines import JsonLinesReader, JsonLinesStream
from sparsellm.data.text.readers import Block, ParquetReader, Rows, ShardReader, TextReader
from sparsellm.data.text.separated import SeparatedReader
from sparsellm.data.text.shards import Shard
from sparsellm.data.text.token_shards import TokenReader
from sparsellm.data.tokenizer import Tokens

# Lanes of one worker read neighbouring blocks of the same shards, or each its own shard.
MOST_BYTES = 512 * 2**20
MOST_READERS = 128
# Readers per stream: a lane far behind the others (a huge document) needs its own position.
MOST_READERS_PER_STREAM = 4
MOST_DOCUMENTS = 256  # read at a time

_Column = tuple[str, str, str | None]  # address, text field and separator
_READERS: dict[str, Callable[[Shard], ShardReader]] = {
    "parquet": ParquetReader,
    "jsonl": lambda shard: (JsonLinesStream if shard.compression else JsonLinesReader)(shard),
    "tokens": TokenReader,
    "sources": lambda shard: (SeparatedReader if shard.separator else TextReader)(shard),
}


def open_shard(shard: Shard) -> ShardReader:
    """Opens a shard.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is damaged or has no such text field.
        ConnectionError: the network failed until `retry` gave up.
    """
    return _READERS[shard.format](shard)


class BlockCache:
    """Documents by shard, block and row; keeps the most recently used blocks, up to ``most_bytes``.

    A stream (a compressed file) is read from front to back; it is reopened when an earlier block is
    needed again.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._readers: OrderedDict[_Column, list[ShardReader]] = OrderedDict()
        self._blocks: OrderedDict[tuple[_Column, int], Block] = OrderedDict()
        self._num_blocks: dict[_Column, int] = {}  # of streams that were read to the end

    def num_blocks(self, shard: Shard) -> int | None:
        """A shard's number of blocks, or None for a stream.

        Raises:
            FileNotFoundError, ValueError, ConnectionError: as `open_shard`.
        """
        return self._readers_of(shard)[0].num_blocks

    def size(self, shard: Shard, block: int) -> int | None:
        """Number of rows of a block; None past the end of a stream."""
        loaded_block = self._block(shard, block)
        return None if loaded_block is None else len(loaded_block)

    def sizes(self, shard: Shard) -> Iterator[int]:
        """Number of rows of each block of a shard, from front to back."""
        num_blocks = self.num_blocks(shard)
        for block in itertools.count() if num_blocks is None else range(num_blocks):
            size = self.size(shard, block)
            if size is None:
                return
            yield size

    def documents(self, shard: Shard, block: int, rows: Rows) -> list[str] | list[Tokens]:
        """The documents at ``rows`` of a block, in that order.

        A null is an empty document, and so is a document that is not in the shard's part.
        """
        loaded_block = self._block(shard, block)
        assert loaded_block is not None
        contents = loaded_block.documents(rows)
        return [shard.portion(content) for content in contents]  # type: ignore[return-value,type-var]

    def _block(self, shard: Shard, index: int) -> Block | None:
        column = _column(shard)
        key = (column, index)
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        if index >= self._num_blocks.get(column, math.inf):
            return None
        reader = self._reader_at(shard, index)
        # Blocks that a stream passes are cached too, for lanes that are a little behind.
        for place in range(index if reader.next_block is None else reader.next_block, index + 1):
            block = reader.read(place)
            if block is None:
                self._num_blocks[column] = place
                return None
            self._keep((column, place), block)
        return self._blocks[key]

    def _keep(self, key: tuple[_Column, int], block: Block) -> None:
        if key in self._blocks:
            self._bytes -= self._blocks.pop(key).num_bytes
        self._blocks[key] = block
        self._bytes += block.num_bytes
        while self._bytes > self._most_bytes and len(self._blocks) > 1:
            _, oldest = self._blocks.popitem(last=False)
            self._bytes -= oldest.num_bytes

    def _readers_of(self, shard: Shard) -> list[ShardReader]:
        column = _column(shard)
        if column not in self._readers:
            self._readers[column] = [open_shard(shard)]
            if len(self._readers) > MOST_READERS:
                _, oldest = self._readers.popitem(last=False)
                for reader in oldest:
                    reader.close()
        self._readers.move_to_end(column)
        return self._readers[column]

    def _reader_at(self, shard: Shard, index: int) -> ShardReader:
        """The reader that has the least to skip before block ``index``."""
        readers = self._readers_of(shard)
        ready = [reader for reader in readers if (reader.next_block or 0) <= index]
        if ready:
            best = max(ready, key=lambda reader: reader.next_block or 0)
            readers.remove(best)
        else:
            best = open_shard(shard)
        readers.append(best)
        if len(readers) > MOST_READERS_PER_STREAM:
            readers.pop(0).close()
        return best


def documents_in_order(shards: tuple[Shard, ...]) -> Iterator[Sequence[str | Tokens]]:
    """Every document of the shards, up to `MOST_DOCUMENTS` of a block at a time; some are empty."""
    blocks = BlockCache(most_bytes=0)
    for shard in shards:
        for block, size in enumerate(blocks.sizes(shard)):
            for first in range(0, size, MOST_DOCUMENTS):
                rows = np.arange(first, min(first + MOST_DOCUMENTS, size))
                yield blocks.documents(shard, block, rows)


def texts_in_order(shards: tuple[Shard, ...]) -> Iterator[str | Tokens]:
    """As `documents_in_order`, one by one, without those that are empty."""
    return filter(len, itertools.chain.from_iterable(documents_in_order(shards)))


def _column(shard: Shard) -> _Column:
    # Two corpora of a mixture may read two columns of one file.
    return shard.url, shard.text_field, shard.separator
