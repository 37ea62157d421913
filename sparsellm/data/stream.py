"""One lane: which documents it reads, in which order, and how they become sequences.

The global stream of a corpus is dealt over a fixed number of lanes (lanes.py). Their documents are
disjoint and together complete, every epoch. Shards, blocks and the rows of each are visited in
permutations that follow from (seed, epoch) alone, so nothing of the order has to be saved: a
position is a handful of integers, the `Cursor`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsellm.data.text.blocks import MOST_DOCUMENTS, BlockCache, Rows, texts_in_order
from sparsellm.data.text.identity import text_bytes
from sparsellm.data.text.shards import Shard
from sparsellm.data.tokenizer import Tokenizer, Tokens

# Documents tokenised at a time: few at first, so that the first sequence is soon ready, then more,
# so that a block is fetched from the cache less often. The cursor does not depend on it.
FIRST_DOCUMENTS = 8
MOST_CHARACTERS = 2**21
# With fewer shards (blocks) than this many per lane, several lanes divide them inside: whole ones
# would be shared out too unevenly.
MIN_UNITS_PER_LANE = 4
# Standard deviation of the text of a group of lanes that share shards, relative to the mean.
MOST_UNEVEN = 1 / 8
NO_TOKEN = -1


class Cursor(NamedTuple):
    """Where the next sequence begins. Positions count along the lane's own permutations."""

    epoch: int = 0
    shard: int = 0
    block: int = 0
    row: int = 0
    offset: int = 0  # tokens of that document already used
    carry: int = NO_TOKEN  # last target of the sequence before, first input of the next


@dataclass(frozen=True)
class LaneConfig:
    """Everything that determines a lane's documents and their order."""

    shards: tuple[Shard, ...]
    lane: int
    num_lanes: int
    seed: int
    num_groups: int | None = None  # of lanes that share their shards; None: `choose_num_groups`
    spread_small_blocks: bool = True  # see `Stride.first_row`; False in runs that began without it

    @property
    def groups(self) -> int:
        """Lane i is in group i % groups, and a shard is one group's."""
        return self.num_groups or choose_num_groups(self.shards, self.num_lanes)


def choose_num_groups(shards: tuple[Shard, ...], num_lanes: int) -> int:
    """The most groups of lanes that get `MIN_UNITS_PER_LANE` shards and about as much text each, or
    one.

    Whoever reads a lane decompresses its group's shards: the more groups, the less is read twice.
    The fewer shards a group has, and the more these differ in size, the more its text differs from
    that of other groups, whose lanes then repeat theirs before it is read.
    """
    sizes = [size for shard in shards if (size := text_bytes(shard)) is not None]
    all_known = len(sizes) == len(shards) and any(sizes)
    variance = float(np.var(sizes) / np.mean(sizes) ** 2) if all_known else 0.0
    most = len(shards) / max(MIN_UNITS_PER_LANE, variance / MOST_UNEVEN**2)
    return max(n for n in range(1, num_lanes + 1) if num_lanes % n == 0 and n <= max(most, 1))


class Document(NamedTuple):
    """A text, or the tokens of a tokenised one, and the cursor at its first token."""

    start: Cursor  # carry not set
    content: str | Tokens


def documents(config: LaneConfig, blocks: BlockCache, cursor: Cursor) -> Iterator[Document]:
    """The lane's documents from ``cursor`` on, epoch after epoch, for ever.

    Raises:
        ValueError: the corpus holds no document.
    """
    epoch, start, empty = cursor.epoch, cursor, 0
    while True:
        empty += 1
        for document in _epoch(config, blocks, epoch, start):
            empty = 0
            yield document
        # Epochs in which few shards have text often hold nothing for this lane.
        if empty == 4 * config.num_lanes and next(texts_in_order(config.shards), None) is None:
            where = name_some(config.shards)
            raise ValueError(f"no document with text in {where}: all of them are empty")
        epoch += 1
        start = Cursor(epoch=epoch)


def _epoch(config: LaneConfig, blocks: BlockCache, epoch: int, start: Cursor) -> Iterator[Document]:
    groups = config.groups
    order = permutation(len(config.shards), config.seed, epoch)[config.lane % groups :: groups]
    sharing = config.num_lanes // groups
    for place in range(start.shard, len(order)):
        index = int(order[place])
        shard, seed = config.shards[index], (config.seed, epoch, index)
        # The first unit turns from shard to shard and from epoch to epoch, so that remainders do
        # not fall to the same lane.
        turn = (config.lane // groups + place + epoch) % sharing
        begin = start if place == start.shard else Cursor(epoch, place)
        stride = Stride(turn, sharing, config.spread_small_blocks)
        for at, block, rows in _blocks(blocks, shard, stride, seed, begin.block):
            first = begin.row if at == begin.block else 0
            for row, content in _contents(blocks, shard, block, rows, first):
                if len(content):
                    yield Document(Cursor(epoch, place, at, row), content)


class Stride(NamedTuple):
    """Which blocks of a shard, or which rows of each of its blocks, are a lane's."""

    first: int
    step: int
    spread_small_blocks: bool

    def first_row(self, block: int, size: int) -> int:
        """The first of the lane's rows in a block of so many.

        Blocks have no row for some lanes if they are small: for the same ones in block after block,
        if these followed one another.
        """
        is_spread = self.spread_small_blocks and size < self.step
        shift = block * _far_step(self.step) if is_spread else block
        return (self.first + shift) % self.step


def _blocks(
    blocks: BlockCache, shard: Shard, stride: Stride, seed: tuple[int, ...], start: int
) -> Iterator[tuple[int, int, Rows]]:
    """(place, block, its rows that the stride selects) of a shard from place ``start`` on."""
    step = stride.step
    num_blocks = blocks.num_blocks(shard)
    order = None if num_blocks is None else permutation(num_blocks, *seed)
    # A stream, whose number of blocks shows at its end, is read from front to back.
    by_block = step == 1 or (order is not None and len(order) >= MIN_UNITS_PER_LANE * step)
    if order is not None and by_block:
        order = order[stride.first :: step]
    for place in itertools.count(start) if order is None else range(start, len(order)):
        block = place if order is None else int(order[place])
        size = blocks.size(shard, block)
        if size is None:
            return
        rows = permutation(size, *seed, block)
        yield place, block, rows if by_block else rows[stride.first_row(block, size) :: step]


@cache
def _far_step(count: int) -> int:
    """Its multiples, modulo ``count``, take every value, and consecutive ones are far apart."""
    coprime = (n for n in range(1, count + 1) if math.gcd(n, count) == 1)
    return min(coprime, key=lambda n: abs(n - 0.618 * count))


def _contents(
    blocks: BlockCache, shard: Shard, block: int, rows: Rows, begin: int
) -> Iterator[tuple[int, str | Tokens]]:
    """The documents of the rows from ``begin`` on, a few at a time: a lane holds little of them."""
    count = FIRST_DOCUMENTS
    while begin < len(rows):
        fetched = blocks.documents(shard, block, rows[begin : begin + count])
        yield from enumerate(fetched, start=begin)
        begin, count = begin + count, min(2 * count, MOST_DOCUMENTS)


def name_some(shards: tuple[Shard, ...]) -> str:
    """The number of files, and the names of the first ones."""
    names = ", ".join(shard.url for shard in shards[:3])
    return f"{len(shards)} files ({names}{', …' if len(shards) > 3 else ''})"


def permutation(length: int, *seed: int) -> NDArray[np.int64]:
    """A permutation that is the same on every platform and in every version of numpy."""
    # Philox and SeedSequence are specified by numpy.
    bits = np.random.Philox(np.random.SeedSequence(list(seed)))
    return np.random.Generator(bits).permutation(length)


def pack(
    config: LaneConfig,
    blocks: BlockCache,
    tokenizer: Tokenizer,
    context_length: int,
    cursor: Cursor,
) -> Iterator[tuple[Tokens, Cursor]]:
    """Sequences of ``context_length + 1`` ids, each with the cursor after it.

    Documents, each ended by ``eot_id``, are joined without loss; a sequence begins with the last
    token of the one before, so that every token is a target exactly once.
    """
    sequence_T1 = np.empty(context_length + 1, dtype=np.int32)
    filled = 0
    # The last id of a sequence, a target there, is the first input of the next one.
    if cursor.carry != NO_TOKEN:
        sequence_T1[0] = cursor.carry
        filled = 1
    skip = cursor.offset
    for start, tokens in _tokenised(documents(config, blocks, cursor), tokenizer):
        used = skip
        skip = 0
        while used < len(tokens):
            take = min(len(sequence_T1) - filled, len(tokens) - used)
            sequence_T1[filled : filled + take] = tokens[used : used + take]
            used += take
            filled += take
            if filled == len(sequence_T1):
                carry = int(sequence_T1[-1])
                # The cursor names this document and what of it has been used.
                yield sequence_T1.copy(), start._replace(offset=used, carry=carry)
                sequence_T1[0] = carry
                filled = 1


def _tokenised(stream: Iterator[Document], tokenizer: Tokenizer) -> Iterator[tuple[Cursor, Tokens]]:
    """Each document's tokens with ``eot_id`` at the end."""
    most = FIRST_DOCUMENTS
    while True:
        batch: list[Document] = []
        characters = 0
        while len(batch) < most and characters < MOST_CHARACTERS:
            document = next(stream)
            batch.append(document)
            characters += len(document.content)
        most = min(2 * most, MOST_DOCUMENTS)
        contents = with_eot([document.content for document in batch], tokenizer)
        for document, tokens in zip(batch, contents, strict=True):
            yield document.start, tokens


def with_eot(contents: Sequence[str | Tokens], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Tokens of each document, ended by ``eot_id``; an empty text has none.

    Documents that are tokens already stay as they are.
    """
    encoded = iter(tokenizer.encode_batch([c for c in contents if isinstance(c, str) and c]))
    eot = np.array([tokenizer.eot_id], dtype=np.int32)
    for content in contents:
        if not isinstance(content, str):
            yield content
        else:
            yield np.concatenate([next(encoded), eot]) if content else eot[:0]
