"""What is trained on and what is held out: a share of the documents, and nothing in both."""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path

from sparsellm.data.text.blocks import texts_in_order
from sparsellm.data.text.identity import content_identity
from sparsellm.data.text.shards import Shard, document_hash, real_place, warn_once

# Of a small text a whole document may be far more than the share. Where it is more than this, the
# end of it is held out.
MOST_OF_TEXT = 0.1

Divided = tuple[tuple[Shard, ...], tuple[Shard, ...]]


def hold_out(shards: tuple[Shard, ...], fraction: float) -> Divided:
    """The shards for training, and those for held-out text.

    Documents whose hash is below ``fraction`` are held out. If this left one part without text, the
    documents with the lowest hashes are held out instead: at least one, and so many that they have
    ``fraction`` of the text. Only the end of the last one is held out if all of it would be more
    than `MOST_OF_TEXT`. So a text of one document is divided as well.

    Reads documents until both parts have one.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: as reading the shards does.
    """
    lengths: Counter[float] = Counter()  # by hash; equal documents stay together
    held_out = trained = False
    for content in texts_in_order(shards):
        document_at, length = document_hash(content), len(content)
        lengths[document_at] += length
        held_out, trained = held_out or document_at < fraction, trained or document_at >= fraction
        if held_out and trained:
            return _at(shards, fraction)
    if not lengths:
        return _at(shards, fraction)
    ordered = sorted(lengths.items())
    ends = list(accumulate(length for _, length in ordered))
    held_out_length = fraction * ends[-1]
    last = bisect_left(ends, held_out_length)
    document_at, length = ordered[last]
    behind = math.nextafter(document_at, 1)
    if ends[last] <= max(held_out_length, MOST_OF_TEXT * ends[-1]) and last + 1 < len(ordered):
        return _at(shards, behind)
    share = (ends[last] - held_out_length) / length
    train = (replace(s, part=(document_at, 1.0), divided=(document_at, 0, share)) for s in shards)
    held = (replace(s, part=(0.0, behind), divided=(document_at, share, 1)) for s in shards)
    return tuple(train), tuple(held)


def check_apart(corpora: Sequence[tuple[str, Sequence[Shard], Sequence[Shard]]]) -> None:
    """Checks that nothing is held out by one corpus and trained on by it or by another one.

    Warns of training files that are copies of held-out ones, which a user may have on purpose.

    Args:
        corpora: name, training shards and held-out shards of each.

    Raises:
        ValueError: documents of one file are in both parts.
    """
    held_out = [(name, shard) for name, _, validation in corpora for shard in validation]
    # Only files that may share documents with held-out ones are compared, by cheap keys first.
    parts = {(shard.part, shard.divided): shard for _, shard in held_out}.values()
    trained: defaultdict[_Key, list[tuple[str, Shard]]] = defaultdict(list)
    for name, train, _ in corpora:
        for shard in train:
            if any(shard.shares_documents(part) for part in parts):
                for key in _keys(shard):
                    trained[key].append((name, shard))
    contents = cache(content_identity)
    for name, shard in held_out:
        for key in _keys(shard):
            for other, candidate in trained.get(key, ()):
                if not shard.shares_documents(candidate):
                    continue
                if real_place(candidate.url) == real_place(shard.url):
                    raise ValueError(
                        f"{shard.url} is held out by corpus {name} and in the training files of "
                        f"corpus {other}; take it out of one of them"
                    )
                # The same text under two names.
                if contents(candidate.url) == contents(shard.url):
                    warn_once(
                        f"{candidate.url}, which corpus {other} trains on, is a copy of "
                        f"{shard.url}, which corpus {name} holds out, so the validation loss is "
                        "not of unseen text: take one of them out"
                    )


_Key = tuple[str | int, str]


def _keys(shard: Shard) -> list[_Key]:
    """What a shard has in common with its file elsewhere and with copies: place, size, column."""
    place = real_place(shard.url)
    try:
        size = Path(place).stat().st_size  # an address has none
    except OSError:
        size = 0
    return [(key, shard.text_field) for key in (place, size) if key]


def _at(shards: tuple[Shard, ...], bound: float) -> Divided:
    train = (replace(shard, part=(bound, 1.0)) for shard in shards)
    held_out = (replace(shard, part=(0.0, bound)) for shard in shards)
    return tuple(train), tuple(held_out)
