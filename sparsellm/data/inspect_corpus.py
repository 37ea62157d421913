"""`sparsellm data inspect`: counts, lengths, duplicates and samples of a corpus."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from tqdm import tqdm

from sparsellm.data.corpus import Corpus
from sparsellm.data.held_out import documents_in_order
from sparsellm.data.shards import Shard
from sparsellm.data.stream import with_eot
from sparsellm.data.tokenizer import Tokenizer, Tokens

SAMPLE_CHARACTERS = 300


@dataclass
class Contents:
    """Counts of a split. Duplicates are documents of equal text, except white space at the ends."""

    documents: int = 0
    empty: int = 0
    tokens: list[int] = field(default_factory=list)  # per document, including its end token
    hashes: list[int] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def inspect(corpus: Corpus, tokenizer: Tokenizer, limit: int | None, num_samples: int) -> str:
    """A report: documents, tokens, their lengths, duplicates, overlap with held-out text, samples.

    Args:
        corpus: a corpus of text or tokens.
        tokenizer: counts tokens and decodes them.
        limit: number of documents per split, the first in order; None: all.
        num_samples: number of training documents whose beginning is shown.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: the corpus cannot be read.
    """
    splits = {"train": corpus.train, "held out": corpus.validation}
    found = {
        name: _read(name, shards, tokenizer, limit, num_samples) for name, shards in splits.items()
    }
    lines = [f"corpus {corpus.name}, tokenizer {tokenizer.name}"]
    for name, contents in found.items():
        lines += ["", f"{name}: {len(splits[name]):,} files", *_count_lines(contents, limit)]
    train, held_out = (set(found[name].hashes) for name in splits)
    common = sum(digest in train for digest in found["held out"].hashes)
    if held_out:
        share = common / len(found["held out"].hashes)
        lines += ["", f"held-out documents that are in train: {common:,} ({share:.2%})"]
    for number, sample in enumerate(found["train"].samples, start=1):
        lines += ["", f"--- sample {number} ---", sample]
    return "\n".join(lines)


def _read(
    name: str, shards: tuple[Shard, ...], tokenizer: Tokenizer, limit: int | None, num_samples: int
) -> Contents:
    contents = Contents()
    with tqdm(total=limit, unit="document", desc=name, leave=False) as bar:
        documents = (
            pair
            for some in documents_in_order(shards)
            for pair in zip(some, with_eot(some, tokenizer), strict=True)
        )
        for content, tokens in islice(documents, limit):
            bar.update()
            if not len(tokens):
                contents.empty += 1
                continue
            contents.documents += 1
            contents.tokens.append(len(tokens))
            text = content if isinstance(content, str) else tokens.tobytes()
            contents.hashes.append(_hash(text))
            if len(contents.samples) < num_samples:
                contents.samples.append(_sample(content, tokenizer))
    return contents


def _hash(content: str | bytes) -> int:
    data = content.strip().encode("utf-8", "replace") if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _sample(content: str | Tokens, tokenizer: Tokenizer) -> str:
    if not isinstance(content, str):
        content = tokenizer.decode(content[:SAMPLE_CHARACTERS].tolist())
    more = " …" if len(content) > SAMPLE_CHARACTERS else ""
    return content[:SAMPLE_CHARACTERS] + more


def _count_lines(contents: Contents, limit: int | None) -> list[str]:
    read = contents.documents + contents.empty
    first = f" (the first {read:,})" if limit is not None and read == limit else ""
    lines = [f"  documents   {contents.documents:,}{first}, {contents.empty:,} empty"]
    if not contents.documents:
        return lines
    lengths = np.array(contents.tokens)
    at = np.percentile(lengths, [1, 50, 99]).round().astype(int)
    duplicates = contents.documents - len(set(contents.hashes))
    return [
        *lines,
        f"  tokens      {lengths.sum():,}",
        f"  per document  mean {lengths.mean():,.0f}, 1% {at[0]:,}, median {at[1]:,}, "
        f"99% {at[2]:,}, largest {lengths.max():,}",
        f"  duplicates  {duplicates:,} ({duplicates / contents.documents:.2%})",
    ]
