"""Held-out sequences: the same whatever the number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from sparsellm.data.stream import with_eot
from sparsellm.data.text.blocks import documents_in_order
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.shards import Shard, warn_once
from sparsellm.data.text.token_shards import check_tokenizer
from sparsellm.data.tokenizer import Tokenizer, Tokens
from sparsellm.words import listed

if TYPE_CHECKING:  # what the text is gets checked before torch is loaded, which takes seconds
    from torch import Tensor

logger = logging.getLogger(__name__)
_ENDS = "corpus %s: held-out text ends after %d of the %d tokens asked for"


def read_in_order(shards: tuple[Shard, ...], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Tokens of every document of the shards, once, unshuffled, each ended by ``eot_id``."""
    for contents in documents_in_order(shards):
        yield from with_eot(contents, tokenizer)


def validated(
    corpora: tuple[Corpus, ...], tokenizer: Tokenizer, context_length: int, *, warns: bool = True
) -> list[Corpus]:
    """The corpora with held-out text for validation.

    Those without any, or of which a share is held out that is less than one sequence, are omitted;
    it ``warns`` of them.

    Raises:
        ValueError: no corpus has held-out text, or one names less than a sequence of it.
    """
    held_out = [corpus for corpus in corpora if corpus.validation]
    without = [corpus.name for corpus in corpora if not corpus.validation]
    if warns and held_out and without:
        warn_once(
            f"no text of {listed(without)} is held out: the validation loss is that of the "
            "mixture's other corpora. To validate on it, set validation_fraction or "
            "validation_files in its YAML"
        )
    long_enough = []
    for corpus in held_out or corpora[:1]:
        try:
            next(held_out_sequences(corpus, tokenizer, context_length))
        except TooShortError:
            if not any(shard.is_part for shard in corpus.validation):
                raise
            if warns:
                warn_once(
                    f"corpus {corpus.name}: the share of its text that is held out is shorter than "
                    f"one sequence of {context_length:,} tokens; the run trains without validation "
                    "on it. To validate, give more text, a larger data.validation_fraction or "
                    "data.validation_files"
                )
            continue
        long_enough.append(corpus)
    return long_enough


class TooShortError(ValueError):
    """The held-out text is less than one sequence."""


def held_out_sequences(
    corpus: Corpus, tokenizer: Tokenizer, context_length: int
) -> Iterator[Tokens]:
    """The held-out text in order, ``context_length + 1`` ids at a time; an incomplete end is left.

    Each sequence begins with the last id of the one before.

    Raises:
        ValueError: the corpus has no held-out text, or less than one sequence (`TooShortError`).
    """
    if not corpus.validation:
        raise ValueError(
            f"corpus {corpus.name} has no held-out text: give some with data.validation_files (the "
            "YAML's is not used together with data.files), hold some out (data.validation_fraction "
            "with data.files, else validation_fraction in its YAML), or train without validation: "
            "validation.every_steps=0"
        )
    check_tokenizer(corpus.validation, tokenizer)
    buffer, none = np.empty(0, dtype=np.int32), True
    for tokens in read_in_order(corpus.validation, tokenizer):
        buffer = np.concatenate([buffer, tokens])
        while len(buffer) > context_length:
            none = False
            # Sequences share an id: the last target is the next one's first input.
            yield buffer[: context_length + 1]
            buffer = buffer[context_length:]
    if none:
        raise TooShortError(
            f"corpus {corpus.name}: the held-out text is shorter than one sequence of "
            f"{context_length} tokens: give more with data.validation_files or a larger "
            "data.validation_fraction, or train without validation: validation.every_steps=0"
        )


def mixed_sequences(
    corpora: Sequence[Corpus], tokenizer: Tokenizer, context_length: int, num_tokens: int
) -> Iterator[Tokens]:
    """Held-out sequences of several corpora, in proportion to their weights at every point.

    As `held_out_sequences` of each, ``num_tokens`` in all, rounded down to whole sequences; fewer,
    with a warning, where the held-out text of a corpus ends earlier.

    Raises:
        ValueError: a corpus has no held-out text, or all have less than one sequence.
    """
    targets = _shares([corpus.weight for corpus in corpora], max(num_tokens // context_length, 1))
    streams = [held_out_sequences(corpus, tokenizer, context_length) for corpus in corpora]
    counts, too_short = [0] * len(corpora), None
    while any(targets):
        # The next one is of the corpus that is furthest behind.
        behind = {i: (counts[i] + 1) / share for i, share in enumerate(targets) if share}
        number = min(behind, key=behind.__getitem__)
        try:
            sequence = next(streams[number], None)
        except TooShortError as error:
            sequence, too_short = None, error
        if sequence is not None:
            counts[number] += 1
            yield sequence
        else:
            tokens, target = counts[number] * context_length, targets[number] * context_length
            logger.warning(_ENDS, corpora[number].name, tokens, target)
        if sequence is None or counts[number] == targets[number]:
            targets[number] = 0
    if too_short is not None and not any(counts):
        raise too_short


def _shares(weights: list[float], number: int) -> list[int]:
    """``number`` divided in proportion to the weights, without rest."""
    exact = [number * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_rest[: number - sum(shares)]:
        shares[i] += 1
    return shares


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
    over all ranks, rounded down to whole sequences, or at the end of the held-out text. A rank
    without sequences yields one empty batch.

    Raises:
        ValueError: the corpus has no held-out text, or less than one sequence.
    """
    import torch

    num_sequences = max(num_tokens // context_length, 1)
    sequences = list(islice(held_out_sequences(corpus, tokenizer, context_length), num_sequences))
    if len(sequences) < num_sequences and rank == 0:
        logger.warning(_ENDS, corpus.name, len(sequences) * context_length, num_tokens)
    rank_sequences = sequences[rank::world_size]
    if not rank_sequences:
        # Same shape as on other ranks, since this rank pads to their number of batches.
        yield torch.empty(0, context_length + 1, dtype=torch.int64)
    for first in range(0, len(rank_sequences), micro_batch_size):
        yield torch.from_numpy(np.stack(rank_sequences[first : first + micro_batch_size])).long()
