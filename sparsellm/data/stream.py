"""Which documents one consumer reads, in which order, and how they become sequences.

A consumer is one worker process of one rank; there are ``num_consumers`` of them and their
documents are disjoint and together complete, every epoch. Shards, row groups and the rows of each
are visited in permutations that follow from (seed, epoch) alone, so nothing of the order has to be
saved: a position is a handful of integers, the `Cursor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsellm.data.corpus import Shard
from sparsellm.data.readers import ShardReader, open_shard
from sparsellm.data.tokenizer import Tokenizer, Tokens

# Documents tokenised at a time; the cursor does not depend on it.
DOCUMENTS_PER_BATCH = 32
# With fewer shards (row groups) than this many a consumer, they are divided inside instead: whole
# ones would be shared out too unevenly.
MIN_UNITS_PER_CONSUMER = 4
NO_TOKEN = -1


class Cursor(NamedTuple):
    """Where the next sequence begins. Positions count along the consumer's own permutations."""

    epoch: int = 0
    shard: int = 0
    block: int = 0
    row: int = 0
    offset: int = 0  # tokens of that document already used
    carry: int = NO_TOKEN  # last target of the sequence before, first input of the next


@dataclass(frozen=True)
class StreamConfig:
    """What decides a consumer's documents and their order."""

    shards: tuple[Shard, ...]
    consumer: int
    num_consumers: int
    seed: int


class Document(NamedTuple):
    """A text and the cursor at its first token (carry not set)."""

    start: Cursor
    text: str


def documents(config: StreamConfig, cursor: Cursor) -> Iterator[Document]:
    """The consumer's documents from ``cursor`` on, epoch after epoch, for ever.

    Raises:
        ValueError: the consumer's part of the corpus holds no document.
    """
    epoch, start = cursor.epoch, cursor
    while True:
        count = 0
        for document in _epoch(config, epoch, start):
            count += 1
            yield document
        if count == 0 and start == Cursor(epoch=epoch):
            raise ValueError(
                f"consumer {config.consumer} of {config.num_consumers} finds no document in "
                f"{len(config.shards)} shards: use fewer ranks or data.num_workers, or more text"
            )
        epoch += 1
        start = Cursor(epoch=epoch)


def _epoch(config: StreamConfig, epoch: int, start: Cursor) -> Iterator[Document]:
    order = _permutation(len(config.shards), config.seed, epoch)
    whole_shards = len(order) >= MIN_UNITS_PER_CONSUMER * config.num_consumers
    if whole_shards:
        order = order[config.consumer :: config.num_consumers]
    for position in range(start.shard, len(order)):
        index = int(order[position])
        reader = open_shard(config.shards[index])
        # The offset turns from shard to shard, so that remainders do not fall to the same consumer.
        turn = (config.consumer + position) % config.num_consumers
        stride = (0, 1) if whole_shards else (turn, config.num_consumers)
        seed = (config.seed, epoch, index)
        here = start if position == start.shard else Cursor(epoch, position)
        for block, row, text in _rows(reader, stride, seed, here.block, here.row):
            if text:
                yield Document(Cursor(epoch, position, block, row), text)


def _rows(
    reader: ShardReader, stride: tuple[int, int], seed: tuple[int, ...], block: int, row: int
) -> Iterator[tuple[int, int, str]]:
    """(block position, row position, text) of the rows that the stride selects in a shard."""
    first, step = stride
    sizes = reader.block_sizes
    by_block = step == 1 or len(sizes) >= MIN_UNITS_PER_CONSUMER * step
    order = _permutation(len(sizes), *seed)
    if by_block:
        order = order[first::step]
    starts = np.cumsum([0, *sizes])
    for position in range(block, len(order)):
        index = int(order[position])
        rows = _permutation(sizes[index], *seed, index)
        if not by_block:
            rows = rows[(rows + starts[index]) % step == first]
        if len(rows) == 0:
            continue
        first_place = row if position == block else 0
        texts = reader.read_rows(index, rows[first_place:])
        for place, text in enumerate(texts, start=first_place):
            yield position, place, text


def _permutation(length: int, *seed: int) -> NDArray[np.int64]:
    # Philox and SeedSequence are specified by numpy: the same on every platform and version.
    bits = np.random.Philox(np.random.SeedSequence(list(seed)))
    return np.random.Generator(bits).permutation(length)


def pack(
    config: StreamConfig, tokenizer: Tokenizer, context_length: int, cursor: Cursor
) -> Iterator[tuple[Tokens, Cursor]]:
    """Sequences of ``context_length + 1`` ids, each with the cursor after it.

    Documents, each ended by ``eot_id``, are joined without loss; a sequence begins with the last
    token of the one before, so that every token is a target exactly once.
    """
    sequence_T1 = np.empty(context_length + 1, dtype=np.int32)
    filled = 0
    if cursor.carry != NO_TOKEN:
        sequence_T1[0] = cursor.carry
        filled = 1
    skip = cursor.offset
    for start, tokens in _tokenised(documents(config, cursor), tokenizer):
        used = skip
        skip = 0
        while used < len(tokens):
            take = min(len(sequence_T1) - filled, len(tokens) - used)
            sequence_T1[filled : filled + take] = tokens[used : used + take]
            used += take
            filled += take
            if filled == len(sequence_T1):
                carry = int(sequence_T1[-1])
                yield sequence_T1.copy(), start._replace(offset=used, carry=carry)
                sequence_T1[0] = carry
                filled = 1


def _tokenised(stream: Iterator[Document], tokenizer: Tokenizer) -> Iterator[tuple[Cursor, Tokens]]:
    eot = np.array([tokenizer.eot_id], dtype=np.int32)
    while True:
        batch = [next(stream) for _ in range(DOCUMENTS_PER_BATCH)]
        encoded = tokenizer.encode_batch([document.text for document in batch])
        for document, tokens in zip(batch, encoded, strict=True):
            yield document.start, np.concatenate([tokens, eot])


def read_in_order(shards: tuple[Shard, ...], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Tokens of every document of the shards, once, unshuffled, each ended by ``eot_id``."""
    eot = np.array([tokenizer.eot_id], dtype=np.int32)
    for shard in shards:
        reader = open_shard(shard)
        for block, size in enumerate(reader.block_sizes):
            texts = [text for text in reader.read_rows(block, np.arange(size)) if text]
            for tokens in tokenizer.encode_batch(texts):
                yield np.concatenate([tokens, eot])
