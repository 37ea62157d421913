"""Micro-batches from background workers, with a state that is exact despite their prefetching.

Every micro-batch travels with its worker's cursor after it; the state of the loader is the cursors
of the batches that were handed out, and whose turn is next.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from sparsellm.data.corpus import Corpus
from sparsellm.data.stream import Cursor, StreamConfig, pack, read_in_order
from sparsellm.data.tokenizer import Tokenizer, Tokens, load_tokenizer
from sparsellm.data.workers import begin_worker, worker_context

logger = logging.getLogger(__name__)


class DataStateMismatch(ValueError):
    """A saved position belongs to another division of the data, or to other data."""


@dataclass(frozen=True)
class _Failure:
    """A worker's error, as a value: the main process raises it without the worker's traceback."""

    error: Exception


@dataclass(frozen=True)
class _Packer(IterableDataset):  # type: ignore[type-arg]
    """Runs in a worker: packs one consumer's stream into micro-batches."""

    streams: tuple[StreamConfig, ...]  # in the order of DataLoader's workers
    cursors: tuple[Cursor, ...]
    tokenizer: str
    context_length: int
    micro_batch_size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Cursor] | _Failure]:
        info = get_worker_info()
        index = info.id if info else 0
        try:
            tokenizer = load_tokenizer(self.tokenizer)
            sequences = pack(
                self.streams[index], tokenizer, self.context_length, self.cursors[index]
            )
            while True:
                batch = [next(sequences) for _ in range(self.micro_batch_size)]
                tokens_BT1 = torch.from_numpy(np.stack([tokens for tokens, _ in batch]))
                yield tokens_BT1.long(), batch[-1][1]
        except (ValueError, OSError) as error:
            yield _Failure(error)


class TokenLoader:
    """An endless iterator of ``tokens_BT1``, int64 (micro_batch_size, context_length + 1).

    Args:
        corpus: what is read.
        tokenizer: how.
        context_length: T, tokens.
        micro_batch_size: B, sequences.
        seed: of the order of shards and documents.
        rank: this rank; its documents are disjoint from the others'.
        world_size: number of ranks.
        num_workers: background processes of this rank; 0 tokenises in this process.
        prefetch_batches: micro-batches a worker keeps ready.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        micro_batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int,
        prefetch_batches: int = 4,
    ) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._micro_batch_size = micro_batch_size
        self._prefetch = prefetch_batches
        self._num_workers = num_workers
        num_streams = max(num_workers, 1)
        self._streams = [
            StreamConfig(corpus.train, rank * num_streams + i, world_size * num_streams, seed)
            for i in range(num_streams)
        ]
        self._cursors = [Cursor()] * num_streams
        self._next_stream = 0
        # What a position is only valid for.
        self._identity = {
            "rank": rank,
            "world_size": world_size,
            "num_workers": num_workers,
            "seed": seed,
            "tokenizer": tokenizer.name,
            "corpus": corpus.fingerprint,
        }
        self._batches: Iterator[Any] | None = None
        _loaders.add(self)

    def __iter__(self) -> TokenLoader:
        return self

    def __next__(self) -> Tensor:
        """The next micro-batch.

        Raises:
            ValueError, OSError: what a worker met, naming the shard.
        """
        if self._batches is None:
            self._batches = iter(self._start())
        item = next(self._batches)
        if isinstance(item, _Failure):
            raise item.error
        tokens_BT1, cursor = item
        self._cursors[self._next_stream] = Cursor(*cursor)
        self._next_stream = (self._next_stream + 1) % len(self._streams)
        # As DataLoader pinned it, not converted: from pageable memory more than 64 KB would be
        # copied after all that the GPU still has to do, and each micro-batch would find it idle.
        return tokens_BT1

    def _start(self) -> DataLoader:  # type: ignore[type-arg]
        # DataLoader asks its workers in turn from number 0: give that number to the stream whose
        # turn it is.
        turn = self._next_stream
        packer = _Packer(
            streams=tuple(self._streams[turn:] + self._streams[:turn]),
            cursors=tuple(self._cursors[turn:] + self._cursors[:turn]),
            tokenizer=self._tokenizer.name,
            context_length=self._context_length,
            micro_batch_size=self._micro_batch_size,
        )
        options: dict[str, Any] = {}
        if self._num_workers:
            options = {
                "prefetch_factor": self._prefetch,
                "worker_init_fn": begin_worker,
                "multiprocessing_context": worker_context(),
            }
        return DataLoader(
            packer,
            batch_size=None,  # the packer makes whole micro-batches
            num_workers=self._num_workers,
            pin_memory=torch.cuda.is_available(),
            **options,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable: the position after the last micro-batch that was handed out."""
        return self._identity | {
            "next_stream": self._next_stream,
            "cursors": [list(cursor) for cursor in self._cursors],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken.

        Raises:
            DataStateMismatch: it was taken with other ranks, workers, seed, tokenizer or corpus.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataStateMismatch(
                    f"the data position was saved with {key} {state.get(key)!r} and this run has "
                    f"{value!r}: it cannot continue exactly"
                )
        self.close()
        self._next_stream = int(state["next_stream"])
        self._cursors = [Cursor(*cursor) for cursor in state["cursors"]]

    def close(self) -> None:
        """Ends the workers; the next `next` starts them again at the present position."""
        workers = getattr(self._batches, "_shutdown_workers", None)
        if workers is not None:
            workers()
        self._batches = None


_loaders: weakref.WeakSet[TokenLoader] = weakref.WeakSet()


# Else Python would wait at exit for the workers of a loader that an error left open: they ignore
# the one SIGTERM it sends. Registered after torch's own end, so run before it.
@atexit.register
def _close_all() -> None:
    for loader in list(_loaders):
        loader.close()


def validation_batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    micro_batch_size: int,
    num_tokens: int,
    rank: int,
    world_size: int,
) -> Iterator[Tensor]:
    """The held-out sequences of this rank, in order: number i belongs to rank i % world_size.

    Yields int64 (at most micro_batch_size, context_length + 1); stops at ``num_tokens`` targets
    over all ranks, rounded down to whole sequences, or at the end of the held-out text. A rank that
    has none yields one batch of none.

    Raises:
        ValueError: the corpus has no held-out text, or not one sequence of it.
    """
    if not corpus.validation:
        raise ValueError(
            f"corpus {corpus.name} has no held-out text: give some with data.validation_files (the "
            "YAML's is not used beside data.files), set validation_shards in its YAML, or do "
            "without: validation.every_steps=0"
        )
    wanted = max(num_tokens // context_length, 1)
    sequences: list[Tokens] = []
    buffer = np.empty(0, dtype=np.int32)
    for tokens in read_in_order(corpus.validation, tokenizer):
        buffer = np.concatenate([buffer, tokens])
        while len(buffer) > context_length and len(sequences) < wanted:
            sequences.append(buffer[: context_length + 1])
            buffer = buffer[context_length:]
        if len(sequences) == wanted:
            break
    if not sequences:
        raise ValueError(
            f"corpus {corpus.name}: the held-out text is shorter than one sequence of "
            f"{context_length} tokens"
        )
    if len(sequences) < wanted and rank == 0:
        logger.warning(
            "corpus %s: held-out text ends after %d of the %d tokens asked for",
            corpus.name,
            len(sequences) * context_length,
            num_tokens,
        )
    own = sequences[rank::world_size]
    if not own:  # the other ranks' shape, for it pads to their number of batches
        yield torch.empty(0, context_length + 1, dtype=torch.int64)
    for first in range(0, len(own), micro_batch_size):
        yield torch.from_numpy(np.stack(own[first : first + micro_batch_size])).long()
