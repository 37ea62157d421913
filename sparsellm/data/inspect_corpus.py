"""`sparsellm data inspect`: counts, lengths, duplicates and samples of a corpus."""

import hashlib
import math

import numpy as np
from tqdm import tqdm

from sparsellm.data.stream import with_eot
from sparsellm.data.text.blocks import documents_in_order
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.token_shards import check_tokenizer
from sparsellm.data.tokenizer import Tokenizer, Tokens

SAMPLE_CHARACTERS = 300


def inspect(corpus: Corpus, tokenizer: Tokenizer, limit: int | None, num_samples: int) -> str:
    """A report: documents, tokens, their lengths, duplicates, overlap with held-out text, samples.

    Duplicates are documents of equal text, except white space at the ends. ``limit`` is a number of
    documents with text per split, the first in order; samples are the beginnings of training
    documents.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: the corpus cannot be read.
        ValueError: its token ids are those of another tokenizer.
    """
    check_tokenizer((*corpus.train, *corpus.validation), tokenizer)
    lines = [f"corpus {corpus.name}, tokenizer {tokenizer.name}"]
    # Digests of documents, not documents: the corpus may be larger than memory.
    hashes: dict[str, list[bytes]] = {}
    samples: list[str] = []
    for name, shards in (("train", corpus.train), ("held out", corpus.validation)):
        documents = (
            pair
            for some in documents_in_order(shards)
            for pair in zip(some, with_eot(some, tokenizer), strict=True)
        )
        lengths, digests = [], hashes.setdefault(name, [])
        for content, tokens in tqdm(documents, unit="document", desc=name, leave=False):
            lengths.append(len(tokens))
            if len(tokens):
                digests.append(_hash(content))
                if name == "train" and len(samples) < num_samples:
                    samples.append(_sample(content, tokenizer))
            if len(digests) == limit:
                break
        first = f" (the first {limit:,})" if len(digests) == limit else ""
        lines += ["", f"{name}: {len(shards):,} files"]
        # A document of the other split of the same file is read as an empty one.
        shared = any(shard.is_part for shard in shards)
        rest = f"{len(lengths) - len(digests):,} empty{' or of the other split' if shared else ''}"
        lines += [f"  documents   {len(digests):,}{first}, {rest}"]
        if digests:
            sizes = np.array([length for length in lengths if length])
            at = np.percentile(sizes, [1, 50, 99]).round().astype(int)
            copies = len(digests) - len(set(digests))
            lines += [
                f"  tokens      {sizes.sum():,}",
                f"  per document  mean {sizes.mean():,.0f}, 1% {at[0]:,}, median {at[1]:,}, "
                f"99% {at[2]:,}, largest {sizes.max():,}",
                f"  duplicates  {copies:,} ({copies / len(digests):.2%})",
            ]
    if held_out := hashes["held out"]:
        train = set(hashes["train"])
        common = sum(digest in train for digest in held_out)
        share = common / len(held_out)
        read = "" if len(hashes["train"]) < (limit or math.inf) else " as far as it was read"
        lines += ["", f"held-out documents that are in train{read}: {common:,} ({share:.2%})"]
    for number, sample in enumerate(samples, start=1):
        lines += ["", f"--- sample {number} ---", sample]
    return "\n".join(lines)


def _hash(content: str | Tokens) -> bytes:
    if isinstance(content, str):
        data = content.strip().encode("utf-8", "replace")
    else:
        data = content.tobytes()
    return hashlib.blake2b(data, digest_size=8).digest()


def _sample(content: str | Tokens, tokenizer: Tokenizer) -> str:
    if not isinstance(content, str):
        content = tokenizer.decode(content[:SAMPLE_CHARACTERS].tolist())
    more = " …" if len(content) > SAMPLE_CHARACTERS else ""
    return content[:SAMPLE_CHARACTERS] + more
