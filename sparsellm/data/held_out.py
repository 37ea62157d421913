"""Held-out sequences: the same whatever the number of ranks."""

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sparsellm.data.blocks import documents_in_order
from sparsellm.data.corpus import Corpus
from sparsellm.data.shards import Shard
from sparsellm.data.stream import with_eot
from sparsellm.data.token_shards import check_tokenizer
from sparsellm.data.tokenizer import Tokenizer, Tokens

logger = logging.getLogger(__name__)


def read_in_order(shards: tuple[Shard, ...], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Tokens of every document of the shards, once, unshuffled, each ended by ``eot_id``."""
    for contents in documents_in_order(shards):
        yield from with_eot(contents, tokenizer)


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
    if not corpus.validation:
        raise ValueError(
            f"corpus {corpus.name} has no held-out text: give some with data.validation_files (the "
            "YAML's is not used together with data.files), set validation_fraction in its YAML, or "
            "do without: validation.every_steps=0"
        )
    check_tokenizer(corpus.validation, tokenizer)
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
            f"{context_length} tokens: give more with data.validation_files or a larger "
            "data.validation_fraction, or do without: validation.every_steps=0"
        )
    if len(sequences) < wanted and rank == 0:
        logger.warning(
            "corpus %s: held-out text ends after %d of the %d tokens asked for",
            corpus.name,
            len(sequences) * context_length,
            num_tokens,
        )
    own = sequences[rank::world_size]
    if not own:  # same shape as on other ranks, since this rank pads to their number of batches
        yield torch.empty(0, context_length + 1, dtype=torch.int64)
    for first in range(0, len(own), micro_batch_size):
        yield torch.from_numpy(np.stack(own[first : first + micro_batch_size])).long()
