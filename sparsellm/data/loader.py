"""Micro-batches for one rank, with a state that is exact despite background workers.

Every sequence carries the position of its lane after it. The state of the loader consists of the
positions of the sequences that it has returned. Merged over the ranks (`merge`) it is the state of
the global stream, from which any number of ranks and workers can continue.
"""

import atexit
import itertools
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.data.lanes import (
    Job,
    LaneState,
    Picks,
    StreamConfig,
    TrainingSequence,
    choose_num_lanes,
    make,
)
from sparsellm.data.position import FORMAT, compare, saved_groups
from sparsellm.data.stream import Cursor, choose_num_groups
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.token_shards import check_tokenizer
from sparsellm.data.tokenizer import Tokenizer, Tokens
from sparsellm.data.workers import Worker, start_workers


class Bookmark(NamedTuple):
    """A position that is cheap to keep in every step; `TokenLoader.state_dict` spells it out.

    It is valid until a state is loaded.
    """

    number: int  # of the next sequence of all ranks
    lanes: dict[int, LaneState]  # that this rank has read
    tokens: dict[str, int]  # of each corpus that all ranks have trained on


class TokenLoader:
    """An endless iterator of ``tokens_BT1``, int64 (micro_batch_size, context_length + 1).

    Args:
        corpora: read in proportion to their weights.
        tokenizer: tokenizes their texts.
        context_length: T, tokens.
        micro_batch_size: B, sequences.
        seed: of the order of shards and documents.
        rank: its sequences are disjoint from the other ranks'.
        world_size: number of ranks.
        num_workers: background processes of this rank; 0 tokenises in this process.

    Raises:
        ValueError: a corpus has no document, or was tokenised by another tokenizer.
    """

    def __init__(
        self,
        corpora: tuple[Corpus, ...],
        tokenizer: Tokenizer,
        *,
        context_length: int,
        micro_batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int,
    ) -> None:
        for corpus in corpora:
            check_tokenizer(corpus.train, tokenizer)
        self._tokenizer = tokenizer
        self._micro_batch_size = micro_batch_size
        self._rank, self._world_size, self._num_workers = rank, world_size, num_workers
        num_lanes = choose_num_lanes(corpora, warns=rank == 0)
        # Once, since workers and later sessions must have the same groups.
        groups = tuple(choose_num_groups(corpus.train, num_lanes) for corpus in corpora)
        self._config = StreamConfig(corpora, context_length, seed, num_lanes, groups)
        self._picks = Picks(corpora, seed)
        # Of the last micro-batch: sequences of each corpus, and how often their text had been read.
        self.texts_2C = np.zeros((2, len(corpora)), np.int64)
        # After the last micro-batch that was handed out.
        self.position = Bookmark(0, {}, {corpus.name: 0 for corpus in corpora})
        self._workers: list[Worker] = []
        self._sequences: Iterator[TrainingSequence] | None = None
        _loaders.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        """The next micro-batch.

        Raises:
            ValueError, OSError: a worker failed (the message names the shard) or was killed.
        """
        if self._sequences is None:
            self.start()
        assert self._sequences is not None
        try:
            sequences = [next(self._sequences) for _ in range(self._micro_batch_size)]
        except BaseException:
            self.close()  # a later call begins after the last micro-batch again
            raise
        self.texts_2C = np.zeros_like(self.texts_2C)
        for _, lane in sequences:
            corpus = self._picks.corpus(lane.number)
            self.texts_2C[:, corpus] += 1, lane.cursors[corpus].epoch
        number, lanes, tokens = self.position
        end = number + len(sequences) * self._world_size
        counts = zip(self._config.corpora, self._picks.counts(number, end), strict=True)
        self.position = Bookmark(
            end,
            lanes | {lane.number % self._config.num_lanes: lane for _, lane in sequences},
            tokens | {c.name: tokens[c.name] + n * self._config.context_length for c, n in counts},
        )
        return _pinned([tokens_T1 for tokens_T1, _ in sequences])

    def start(self) -> None:
        """Starts the workers, which begin to make sequences, unless they have been started.

        The first `next` does it too. A worker's error is raised there.
        """
        if self._sequences is not None:
            return
        first, num_lanes = self.position.number + self._rank, self._config.num_lanes
        # The lanes that the rank needs, in the order in which it first needs them.
        count = num_lanes // math.gcd(self._world_size, num_lanes)
        needed = [(first + i * self._world_size) % num_lanes for i in range(count)]
        lanes = {lane: self.position.lanes.get(lane) for lane in needed}
        job = Job(self._config, self._tokenizer.name, first, self._world_size, lanes)
        if not self._num_workers:
            self._sequences = make(job, self._tokenizer)
            return
        self._workers = start_workers(job, self._num_workers)
        # The rank's sequences come from its lanes in turn, which the workers have in turn.
        turns = itertools.cycle([i % len(self._workers) for i in range(len(lanes))])
        self._sequences = (self._workers[turn].next() for turn in turns)

    def state_dict(self, at: Bookmark | None = None) -> dict[str, Any]:
        """JSON-serialisable: the present position, or that of a bookmark.

        It covers the lanes that this rank has read; `position.merge` merges those of all ranks.
        """
        at = at or self.position
        names = self.corpus_names
        return self._identity() | {
            "number": at.number,
            "num_lanes": self._config.num_lanes,
            "tokens": at.tokens,
            "lanes": {
                str(lane): {
                    "number": state.number,
                    "cursors": dict(zip(names, map(list, state.cursors), strict=True)),
                }
                for lane, state in sorted(at.lanes.items())
            },
        }

    def go_back(self, to: Bookmark) -> None:
        """Continues from a bookmark."""
        self.close()
        self.position = to

    def _identity(self) -> dict[str, Any]:
        """The settings and the text for which a position is valid."""
        corpora = self._config.corpora
        return {
            "format": FORMAT,
            "seed": self._config.seed,
            "tokenizer": self._tokenizer.identity,
            "eot_id": self._tokenizer.eot_id,
            "corpora": {corpus.name: corpus.fingerprint for corpus in corpora},
            "groups": self._config.groups,
            "spread_small_blocks": self._config.spread_small_blocks,
            "witnesses": {corpus.name: corpus.witness for corpus in corpora},
            "held_out": {corpus.name: corpus.held_out for corpus in corpora},
        }

    @property
    def worker_pids(self) -> list[int]:
        """The process numbers of its workers."""
        return [worker.pid for worker in self._workers]

    @property
    def corpus_names(self) -> list[str]:
        """The names of the corpora; more than one are a mixture."""
        return [corpus.name for corpus in self._config.corpora]

    @property
    def text_ids(self) -> dict[str, str]:
        """`Corpus.text_id` of each corpus."""
        return {corpus.name: corpus.text_id for corpus in self._config.corpora}

    @property
    def repeating(self) -> set[str]:
        """The corpora of which this rank has read some text more than once."""
        lanes = self.position.lanes.values()
        cursors = [dict(zip(self.corpus_names, lane.cursors, strict=True)) for lane in lanes]
        return {name for lane in cursors for name, cursor in lane.items() if cursor.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continues from the merged states of all ranks, on any number of ranks and workers.

        Returns sentences about harmless changes since then. A corpus that is new begins at its
        beginning.

        Raises:
            DataStateMismatch: it was taken with another seed, tokenizer or other data.
        """
        notes = compare(state, self._identity())
        self.close()
        names = self.corpus_names
        lanes = {
            int(lane): LaneState(
                saved["number"],
                tuple(Cursor(*saved["cursors"].get(name, Cursor())) for name in names),
            )
            for lane, saved in state["lanes"].items()
        }
        tokens = dict.fromkeys(names, 0) | state["tokens"]
        self.position = Bookmark(state["number"], lanes, tokens)
        self._config = replace(
            self._config,
            num_lanes=state["num_lanes"],
            fixed_groups=saved_groups(state, self._config.corpora),
            # Otherwise the rest of the epoch would repeat some documents and leave out others.
            spread_small_blocks=state.get("spread_small_blocks", False),
        )
        return notes

    def restart(self, states: list[dict[str, Any]]) -> None:
        """Begins at the beginning, and counts on the tokens that ranks had trained on by then."""
        self.close()
        counted = states[0]["tokens"] if states else {}
        self.position = Bookmark(0, {}, dict.fromkeys(self.corpus_names, 0) | counted)

    def resize(self, micro_batch_size: int) -> None:
        """Sets the size of the next micro-batches; the order of the sequences does not change."""
        self._micro_batch_size = micro_batch_size

    def close(self) -> None:
        """Ends the workers; `start` or `next` starts them again at the present position."""
        for worker in self._workers:
            worker.close()
        self._workers, self._sequences = [], None


@dataclass
class MicroBatchReader:
    """Reads the micro-batches of a step.

    A rank that cannot read data continues with zeros and reports the error with the step's numbers.
    Otherwise the other ranks would wait for it in a collective until it times out.
    """

    loader: TokenLoader
    shape: tuple[int, int]  # of a micro-batch: sequences, context_length + 1
    step: int  # 1 is the first
    texts_2C: NDArray[np.int64]  # sum over its micro-batches, see `TokenLoader`
    error: Exception | None = None

    def next(self) -> Tensor:
        """A micro-batch, int64."""
        if self.error is None:
            try:
                tokens_BT1 = next(self.loader)
                self.texts_2C += self.loader.texts_2C
                return tokens_BT1
            except (ValueError, OSError) as error:
                self.error = error
        return torch.zeros(self.shape, dtype=torch.int64)


def _pinned(sequences: list[Tokens]) -> Tensor:
    """A micro-batch, int64.

    A copy of more than 64 KB from pageable memory would wait for all work queued on the GPU, which
    would then be idle before each micro-batch.
    """
    shape = (len(sequences), len(sequences[0]))
    tokens_BT1 = torch.empty(shape, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    np.stack(sequences, out=tokens_BT1.numpy(), casting="safe")
    return tokens_BT1


_loaders: weakref.WeakSet[TokenLoader] = weakref.WeakSet()


# At exit multiprocessing sends one SIGTERM, which workers ignore, and then waits for them: forever,
# if an error has left a loader open. This handler runs before that, since it is registered later.
@atexit.register
def _close_all() -> None:
    for loader in list(_loaders):
        loader.close()
