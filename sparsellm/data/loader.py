"""Micro-batches for one rank, with a state that is exact despite background workers.

Every sequence carries the position of its lane after it. The state of the loader consists of the
positions of the sequences that it has returned. Merged over the ranks (`merge`) it is the state of
the global stream, from which any number of ranks and workers can continue.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsellm.data.corpus import Corpus
from sparsellm.data.lanes import (
    LaneState,
    Made,
    Picks,
    Share,
    StreamConfig,
    choose_num_lanes,
    make,
)
from sparsellm.data.position import FORMAT, compare, saved_groups
from sparsellm.data.stream import Cursor
from sparsellm.data.token_shards import check_tokenizer
from sparsellm.data.tokenizer import Tokenizer
from sparsellm.data.workers import Job, start_workers

PREFETCHED = 4  # micro-batches that workers have made in advance


class _Batch(NamedTuple):
    tokens_BT1: Tensor
    lanes: list[LaneState]  # after each of its sequences


class Counted(NamedTuple):
    """The targets of each corpus in all sequences before a number."""

    number: int
    tokens: dict[str, int]


class Bookmark(NamedTuple):
    """A position that is cheap to keep in every step; `TokenLoader.state_dict` spells it out.

    It is valid until a state is loaded.
    """

    number: int  # of the next sequence of all ranks
    lanes: dict[int, LaneState]  # that this rank has read
    counted: Counted  # up to where tokens were last counted


class TokenLoader:
    """An endless iterator of ``tokens_BT1``, int64 (micro_batch_size, context_length + 1).

    Args:
        corpora: are read in proportion to their weights.
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
        self._config = StreamConfig(corpora, context_length, seed, choose_num_lanes(corpora))
        self._number = 0
        self._lanes: dict[int, LaneState] = {}
        self._counted = Counted(0, {})
        self._batches: _Background | Generator[_Batch] | None = None
        _loaders.add(self)

    def __iter__(self) -> TokenLoader:
        return self

    def __next__(self) -> Tensor:
        """The next micro-batch.

        Raises:
            ValueError, OSError: a worker failed (the message names the shard) or was killed.
        """
        if self._batches is None:
            self._batches = self._start()
        batch = next(self._batches)
        for lane in batch.lanes:
            self._lanes[lane.number % self._config.num_lanes] = lane
        self._number += len(batch.lanes) * self._world_size
        return batch.tokens_BT1

    def _start(self) -> _Background | Generator[_Batch]:
        share, size = Share(self._number + self._rank, self._world_size), self._micro_batch_size
        lanes = {lane: self._lanes.get(lane) for lane in share.lanes(self._config.num_lanes)}
        if not self._num_workers:
            return _in_line(make(self._config, self._tokenizer, share, lanes), size)
        job = Job(self._config, self._tokenizer.name, share, lanes)
        return _Background(job, self._num_workers, size)

    def bookmark(self) -> Bookmark:
        """The position after the last micro-batch that was handed out."""
        return Bookmark(self._number, dict(self._lanes), self._counted)

    def state_dict(self, at: Bookmark | None = None) -> dict[str, Any]:
        """JSON-serialisable: the position after the last micro-batch that was handed out.

        It covers the lanes that this rank has read; `position.merge` merges those of all
        ranks. With a bookmark it is the position there.
        """
        at = at or self.bookmark()
        names = [corpus.name for corpus in self._config.corpora]
        return self._identity() | {
            "number": at.number,
            "num_lanes": self._config.num_lanes,
            "tokens": self.tokens(at),
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
        self._number, self._lanes, self._counted = to.number, dict(to.lanes), to.counted

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
            "witnesses": {corpus.name: corpus.witness for corpus in corpora},
        }

    @property
    def worker_pids(self) -> list[int]:
        """The process numbers of its workers."""
        return self._batches.pids if isinstance(self._batches, _Background) else []

    @property
    def num_corpora(self) -> int:
        """Number of corpora; more than one is a mixture."""
        return len(self._config.corpora)

    def tokens(self, at: Bookmark | None = None) -> dict[str, int]:
        """Tokens of each corpus that all ranks have trained on, if all are at the same step."""
        at = at or self.bookmark()
        corpora, (number, tokens) = self._config.corpora, at.counted
        counts = Picks(corpora, self._config.seed).counts(number, at.number)
        tokens = dict(tokens)
        for corpus, count in zip(corpora, counts, strict=True):
            new = count * self._config.context_length
            tokens[corpus.name] = tokens.get(corpus.name, 0) + new
        self._counted = Counted(at.number, tokens)  # the next call counts on from there
        return tokens

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continues from the merged states of all ranks, on any number of ranks and workers.

        Returns sentences about harmless changes since then. A corpus that is new begins at its
        beginning.

        Raises:
            DataStateMismatch: it was taken with another seed, tokenizer or other data.
        """
        notes = compare(state, self._identity())
        self.close()
        names = [corpus.name for corpus in self._config.corpora]
        self._number = state["number"]
        self._lanes = {
            int(lane): LaneState(
                saved["number"],
                tuple(Cursor(*saved["cursors"].get(name, Cursor())) for name in names),
            )
            for lane, saved in state["lanes"].items()
        }
        self._counted = Counted(self._number, state["tokens"])
        self._config = replace(
            self._config,
            num_lanes=state["num_lanes"],
            fixed_groups=saved_groups(state, self._config),
        )
        return notes

    def resize(self, micro_batch_size: int) -> None:
        """Sets the size of the next micro-batches; the order of the sequences does not change."""
        self.close()
        self._micro_batch_size = micro_batch_size

    def close(self) -> None:
        """Ends the workers; the next `next` starts them again at the present position."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def _in_line(made: Iterator[Made], micro_batch_size: int) -> Generator[_Batch]:
    """Micro-batches that are made in this process, on demand."""
    while True:
        yield _assemble([next(made) for _ in range(micro_batch_size)])


class _Background:
    """Micro-batches that a thread assembles of what workers make."""

    def __init__(self, job: Job, num_workers: int, micro_batch_size: int) -> None:
        self._workers = start_workers(job, num_workers)
        # The rank's sequences come from its lanes in turn, which the workers have in turn.
        self._turns = itertools.cycle(i % len(self._workers) for i in range(len(job.lanes)))
        self._micro_batch_size = micro_batch_size
        self._ready: queue.Queue[_Batch | Exception] = queue.Queue(PREFETCHED)
        self._closed = False
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, args=(device,), daemon=True)
        self._thread.start()

    def __next__(self) -> _Batch:
        batch = self._ready.get()
        if isinstance(batch, Exception):
            self._ready.put(batch)  # kept, so that later calls raise it again
            raise batch
        return batch

    def _run(self, device: int | None) -> None:
        try:
            if device is not None:  # a new thread uses device 0; pinned memory belongs to a device
                torch.cuda.set_device(device)
            while not self._closed:
                turns = itertools.islice(self._turns, self._micro_batch_size)
                self._ready.put(_assemble([self._workers[turn].next() for turn in turns]))
        except Exception as error:
            self._ready.put(error)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.kill()
        while self._thread.is_alive():  # the thread may be waiting for space in the queue
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.01)
        for worker in self._workers:
            worker.close()


def _assemble(made: list[Made]) -> _Batch:
    """A micro-batch, int64 and pinned.

    A copy of more than 64 KB from pageable memory would wait for all work queued on the GPU, which
    would then be idle before each micro-batch.
    """
    shape = (len(made), len(made[0].tokens_T1))
    tokens_BT1 = torch.empty(shape, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    rows = tokens_BT1.numpy()
    for row, sequence in zip(rows, made, strict=True):
        row[:] = sequence.tokens_T1
    return _Batch(tokens_BT1, [sequence.lane for sequence in made])


_loaders: weakref.WeakSet[TokenLoader] = weakref.WeakSet()


# At exit multiprocessing sends one SIGTERM, which workers ignore, and then waits for them: forever,
# if an error has left a loader open. This handler runs before that, since it is registered later.
@atexit.register
def _close_all() -> None:
    for loader in list(_loaders):
        loader.close()
