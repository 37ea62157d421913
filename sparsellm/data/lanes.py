"""The global stream: numbered sequences that do not depend on the number of ranks and workers.

Sequences are numbered from 0 over the whole run. Number s comes from lane ``s % num_lanes``, and a
step trains on the next ``global_batch_tokens / context_length`` numbers; rank r of W takes every
W-th of them. A lane (stream.py) is a logical stream with its own position, so a run can resume
with any other division of the lanes: the state of the global stream is its position and that of
each lane. Where W divides `NUM_LANES`, each lane is read by one rank alone; where it does not,
several ranks read a lane and skip what is not theirs.

Each sequence is of one corpus. A low-discrepancy sequence over s picks it, so that every stretch of
the stream has the corpora in the proportion of their weights, and nothing has to be saved for it.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparsellm.data.stream import Cursor, LaneConfig, name_some, pack
from sparsellm.data.text.blocks import BlockCache, texts_in_order
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.shards import warn_once
from sparsellm.data.tokenizer import Tokenizer, Tokens
from sparsellm.words import counted

# 1, 2, 3, 4, 6, 8, 12, 16, 24 and 48 ranks divide it. More lanes cost memory: each holds a block.
NUM_LANES = 48
# With fewer documents per lane, lanes would end an epoch at very different times.
DOCUMENTS_PER_LANE = 32
ENOUGH_DOCUMENTS = DOCUMENTS_PER_LANE * NUM_LANES  # for all lanes
# Its multiples, modulo 2**64, are evenly spread, and so is every d-th of them for each d that
# divides `NUM_LANES`: a lane, which has every d-th sequence, is to read as much of a corpus as any
# other. (48 times the golden ratio is nearly a multiple of a third: with that, half of a corpus
# with a tenth of the tokens was unread when some lanes had read theirs three times.) Found by
# search: up to denominators of 200,000, the partial quotients of d · _WEYL / 2**64 are at most 8.
_WEYL = 0x9B92B0BE73FB2BC3


@dataclass(frozen=True)
class StreamConfig:
    """Everything that determines the global stream."""

    corpora: tuple[Corpus, ...]
    context_length: int
    seed: int
    num_lanes: int = NUM_LANES
    fixed_groups: tuple[int, ...] = ()  # of each corpus; none: chosen by its files' sizes
    spread_small_blocks: bool = True  # as in `LaneConfig`

    def lane(self, corpus: int, lane: int) -> LaneConfig:
        """Everything that determines a lane's documents of a corpus."""
        num_groups = self.fixed_groups[corpus] if self.fixed_groups else None
        return LaneConfig(
            self.corpora[corpus].train,
            lane,
            self.num_lanes,
            self.seed,
            num_groups,
            self.spread_small_blocks,
        )

    @property
    def groups(self) -> dict[str, int]:
        """Groups of lanes of each corpus."""
        return {c.name: self.lane(index, 0).groups for index, c in enumerate(self.corpora)}


class LaneState(NamedTuple):
    """A lane after one of its sequences."""

    number: int  # of that sequence
    cursors: tuple[Cursor, ...]  # of each corpus, in the order of `StreamConfig.corpora`


class TrainingSequence(NamedTuple):
    """A sequence, and its lane after it."""

    tokens_T1: Tokens
    lane: LaneState


class Job(NamedTuple):
    """The sequences of a rank, or of one of its workers, that lie in some lanes."""

    config: StreamConfig
    tokenizer: str
    first: int  # of the rank; further ones are every ``world_size``-th
    world_size: int
    lanes: dict[int, LaneState | None]  # None: at its start


def make(job: Job, tokenizer: Tokenizer) -> Iterator[TrainingSequence]:
    """The sequences of a job in order, endlessly.

    Raises:
        ValueError, OSError: a shard cannot be read; names the shard.
    """
    config, blocks, picks = job.config, BlockCache(), Picks(job.config.corpora, job.config.seed)
    begins = {
        lane: lane if state is None else state.number + config.num_lanes
        for lane, state in job.lanes.items()
    }
    lanes = {lane: _lane(job, tokenizer, blocks, picks, first) for lane, first in begins.items()}
    for number in itertools.count(min(begins.values())):
        lane = number % config.num_lanes
        if number < begins.get(lane, math.inf):
            continue
        sequence = next(lanes[lane])
        # Sequences of other ranks are made and discarded, since the lane continues after them.
        if number >= job.first and (number - job.first) % job.world_size == 0:
            yield sequence


def _lane(
    job: Job, tokenizer: Tokenizer, blocks: BlockCache, picks: "Picks", begin: int
) -> Iterator[TrainingSequence]:
    """The sequences of a lane from number ``begin`` on; each corpus packs its own."""
    config, lane = job.config, begin % job.config.num_lanes
    state = job.lanes[lane]
    cursors = list(state.cursors if state else [Cursor()] * len(config.corpora))
    packed = [
        pack(config.lane(index, lane), blocks, tokenizer, config.context_length, cursor)
        for index, cursor in enumerate(cursors)
    ]
    for number in itertools.count(begin, config.num_lanes):
        corpus = picks.corpus(number)
        tokens_T1, cursors[corpus] = next(packed[corpus])
        yield TrainingSequence(tokens_T1, LaneState(number, tuple(cursors)))


class Picks:
    """Picks the corpus of each sequence."""

    def __init__(self, corpora: tuple[Corpus, ...], seed: int) -> None:
        weights = np.array([corpus.weight for corpus in corpora])
        # Floats are exact to 2**53 only, which here is a share of 1e-16.
        bounds = [int(share * 2.0**64) for share in np.cumsum(weights / weights.sum())[:-1]]
        self._bounds = np.array(bounds, dtype=np.uint64)
        self._phase = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])

    def corpus(self, number: int) -> int:
        """Index of the corpus of sequence ``number``."""
        place = (self._phase + number * _WEYL) % 2**64
        return int(np.searchsorted(self._bounds, np.uint64(place), side="right"))

    def counts(self, begin: int, end: int) -> list[int]:
        """Sequences of each corpus among the numbers from ``begin`` to before ``end``."""
        numbers = np.arange(begin, end, dtype=np.uint64)
        places = numbers * np.uint64(_WEYL) + np.uint64(self._phase)  # modulo 2**64
        corpora = np.searchsorted(self._bounds, places, side="right")
        return np.bincount(corpora, minlength=len(self._bounds) + 1).tolist()


def choose_num_lanes(corpora: tuple[Corpus, ...], *, warns: bool = True) -> int:
    """`NUM_LANES`, or a divisor of it if a corpus is too small to keep all lanes busy.

    Reads only as many documents as needed to decide. It ``warns`` if a small corpus of a mixture
    decides for all.

    Raises:
        ValueError: a corpus has no document with text.
    """
    counts = {corpus.name: _count_documents(corpus, ENOUGH_DOCUMENTS) for corpus in corpora}
    smallest = min(counts, key=counts.__getitem__)
    divisors = [n for n in range(1, NUM_LANES + 1) if NUM_LANES % n == 0]
    num_lanes = max(n for n in divisors if n == 1 or n * DOCUMENTS_PER_LANE <= counts[smallest])
    if warns and len(corpora) > 1 and num_lanes < NUM_LANES:
        warn_once(
            f"corpus {smallest} has only {counted(counts[smallest], 'document')}, so all corpora "
            f"are read as {counted(num_lanes, 'stream')} in place of {NUM_LANES}: the text of a "
            "step is mixed less. To avoid it, divide that text into at least "
            f"{ENOUGH_DOCUMENTS:,} documents"
        )
    return num_lanes


def _count_documents(corpus: Corpus, enough: int) -> int:
    """Documents with text in a corpus, counted up to ``enough``."""
    count = sum(1 for _ in itertools.islice(texts_in_order(corpus.train), enough))
    if not count:
        held_out = any(shard.is_part for shard in corpus.train)
        raise ValueError(
            f"corpus {corpus.name}: no document with text in {name_some(corpus.train)}: all of "
            f"them are empty{' or held out (data.validation_fraction)' if held_out else ''}"
        )
    return count
