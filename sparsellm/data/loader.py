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
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsellm.data.corpus import Corpus
from sparsellm.data.lanes import LaneState, Made, Share, StreamConfig, choose_num_lanes, make
from sparsellm.data.position import (
    FORMAT,
    DataStateMismatch,
    Position,
    advance,
    compare_corpora,
    compare_witnesses,
    from_json,
    saved_groups,
    to_json,
)
from sparsellm.data.token_shards import check_tokenizer
from sparsellm.data.tokenizer import Tokenizer
from sparsellm.data.workers import Job, Worker, worker_context

if TYPE_CHECKING:  # workers import this folder, and are smaller without torch
    from torch import Tensor


PREFETCHED = 4  # micro-batches that workers have made in advance


class _Batch(NamedTuple):
    tokens_BT1: Tensor
    lanes: list[LaneState]  # after each of its sequences


class Bookmark(NamedTuple):
    """A position that is cheap to keep in every step; `TokenLoader.state_dict` spells it out.

    It is valid until a state is loaded.
    """

    lanes: dict[int, LaneState]
    handed_out: int
    counted: Position


class TokenLoader:
    """An endless iterator of ``tokens_BT1``, int64 (micro_batch_size, context_length + 1).

    Args:
        corpora: corpora to read, in proportion to their weights.
        tokenizer: tokenizes them.
        context_length: T, tokens.
        micro_batch_size: B, sequences.
        seed: seed of the order of shards and documents.
        rank: this rank; its sequences are disjoint from the others'.
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
        self._position = Position(num_lanes=self._config.num_lanes)
        self._handed_out = 0  # of this rank, since `_position.number`
        self._counted = self._position  # up to where tokens were last counted
        self._source: _Background | _InLine | None = None
        _loaders.add(self)

    def __iter__(self) -> TokenLoader:
        return self

    def __next__(self) -> Tensor:
        """The next micro-batch.

        Raises:
            ValueError, OSError: a worker failed (the message names the shard) or was killed.
        """
        if self._source is None:
            self._source = self._start()
        batch = self._source.next()
        for lane in batch.lanes:
            self._position.lanes[lane.number % self._config.num_lanes] = lane
        self._handed_out += len(batch.lanes)
        return batch.tokens_BT1

    def _start(self) -> _Background | _InLine:
        first = self._position.number + self._rank + self._handed_out * self._world_size
        share = Share(first, self._world_size)
        if self._num_workers:
            job = Job(self._config, self._tokenizer.name, share, self._position.lanes)
            return _Background(job, self._num_workers, self._micro_batch_size)
        made = make(self._config, self._tokenizer, share, dict(self._position.lanes))
        return _InLine(made, self._micro_batch_size)

    def bookmark(self) -> Bookmark:
        """The position after the last micro-batch that was handed out."""
        return Bookmark(dict(self._position.lanes), self._handed_out, self._counted)

    def state_dict(self, at: Bookmark | None = None) -> dict[str, Any]:
        """JSON-serialisable: the position after the last micro-batch that was handed out.

        It covers the lanes that this rank has read; `position.merge` merges those of all
        ranks. With a bookmark it is the position there.
        """
        at = at or self.bookmark()
        names = [corpus.name for corpus in self._config.corpora]
        return (
            self._identity()
            | {"groups": self._config.groups, "witnesses": self._witnesses()}
            | to_json(replace(self._count(at), lanes=at.lanes), names)
        )

    def go_back(self, to: Bookmark) -> None:
        """Continues from a bookmark."""
        self.load_state_dict(self.state_dict(to))

    def _identity(self) -> dict[str, Any]:
        """The settings for which a position is valid."""
        return {
            "format": FORMAT,
            "seed": self._config.seed,
            "tokenizer": self._tokenizer.identity,
            "eot_id": self._tokenizer.eot_id,
            "corpora": {corpus.name: corpus.fingerprint for corpus in self._config.corpora},
        }

    def _witnesses(self) -> dict[str, str | None]:
        return {corpus.name: corpus.witness for corpus in self._config.corpora}

    @property
    def worker_pids(self) -> list[int]:
        """The process numbers of its workers."""
        return self._source.pids if self._source is not None else []

    @property
    def num_corpora(self) -> int:
        """Number of corpora; more than one is a mixture."""
        return len(self._config.corpora)

    def tokens(self, at: Bookmark | None = None) -> dict[str, int]:
        """Tokens of each corpus that all ranks have trained on, if all are at the same step."""
        return self._count(at or self.bookmark()).tokens

    def _count(self, at: Bookmark) -> Position:
        """The position at a bookmark, with its tokens; the next call counts on from there."""
        number = self._position.number + at.handed_out * self._world_size
        self._counted = advance(at.counted, number, self._config)
        return self._counted

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continues from the merged states of all ranks, on any number of ranks and workers.

        Returns sentences about harmless changes since then.

        Raises:
            DataStateMismatch: it was taken with another seed, tokenizer or other data.
        """
        own = self._identity()
        position = from_json(state, list(own["corpora"]))
        for key in ("seed", "tokenizer", "eot_id"):
            saved = state.get(key, own[key])  # earlier versions had no eot_id
            if saved != own[key]:
                what = "end-of-document id" if key == "eot_id" else key
                raise DataStateMismatch(
                    f"the data position was saved with {what} {saved!r} and this run has "
                    f"{own[key]!r}"
                )
        notes = compare_corpora(state["corpora"], own["corpora"])
        witnesses = state.get("witnesses", {})  # earlier versions had none
        for name, present in self._witnesses().items():
            notes += compare_witnesses(name, witnesses.get(name), present)
        self.close()
        self._position = self._counted = position
        self._handed_out = 0
        self._config = replace(
            self._config,
            num_lanes=position.num_lanes,
            fixed_groups=saved_groups(state, self._config),
        )
        return notes

    def resize(self, micro_batch_size: int) -> None:
        """Sets the size of the next micro-batches; the order of the sequences does not change."""
        self.close()
        self._micro_batch_size = micro_batch_size

    def close(self) -> None:
        """Ends the workers; the next `next` starts them again at the present position."""
        if self._source is not None:
            self._source.close()
            self._source = None


class _InLine:
    """Makes micro-batches in this process, on demand."""

    def __init__(self, made: Iterator[Made], micro_batch_size: int) -> None:
        self._made, self._micro_batch_size = made, micro_batch_size

    def next(self) -> _Batch:
        return _assemble([next(self._made) for _ in range(self._micro_batch_size)])

    @property
    def pids(self) -> list[int]:
        """None."""
        return []

    def close(self) -> None:
        """Does nothing: there are no workers."""


class _Background:
    """Workers that make the sequences, and a thread that makes micro-batches of them."""

    def __init__(self, job: Job, num_workers: int, micro_batch_size: int) -> None:
        import torch

        num_lanes = job.config.num_lanes
        lanes = job.share.lanes(num_lanes)
        num_workers = min(num_workers, len(lanes))
        context = worker_context()
        self._workers: list[Worker] = []
        for index in range(num_workers):
            share = replace(job.share, worker=index, num_workers=num_workers)
            own = set(share.own_lanes(num_lanes))
            positions = {lane: at for lane, at in job.lanes.items() if lane in own}
            self._workers.append(Worker(replace(job, share=share, lanes=positions), context))
        # The rank's sequences come from its lanes in turn, and lane i is worker i % num_workers'.
        self._turns = itertools.cycle(i % num_workers for i in range(len(lanes)))
        self._micro_batch_size = micro_batch_size
        self._ready: queue.Queue[_Batch | Exception] = queue.Queue(PREFETCHED)
        self._closed = False
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, args=(device,), daemon=True)
        self._thread.start()

    def next(self) -> _Batch:
        batch = self._ready.get()
        if isinstance(batch, Exception):
            self._ready.put(batch)  # kept, so that later calls raise it again
            raise batch
        return batch

    def _run(self, device: int | None) -> None:
        try:
            if device is not None:  # a new thread uses device 0; pinned memory belongs to a device
                import torch

                torch.cuda.set_device(device)
            while not self._closed:
                turns = itertools.islice(self._turns, self._micro_batch_size)
                self._ready.put(_assemble([self._workers[turn].next() for turn in turns]))
        except Exception as error:
            self._ready.put(error)

    @property
    def pids(self) -> list[int]:
        """Process numbers of its workers."""
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
    import torch

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
