"""`sparsellm data tokenize`: a corpus as shards of token ids, and a YAML that names them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import yaml
from tqdm import tqdm

from sparsellm.data.blocks import BlockCache
from sparsellm.data.corpus import Corpus
from sparsellm.data.shards import Shard, identity, read_about
from sparsellm.data.stream import MOST_DOCUMENTS, with_eot
from sparsellm.data.token_shards import TokenWriter
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.data.workers import begin_worker, worker_context


@dataclass(frozen=True)
class Tokenised:
    """What a shard holds."""

    documents: int
    tokens: int


def tokenize(corpus: Corpus, tokenizer: str, folder: Path, num_workers: int) -> Path:
    """Writes ``folder/{train,validation}/00000.bin`` and so on, and ``folder/<corpus>.yaml``.

    The loader reads the same stream from them, to the id. Shards that are there already and whole
    are kept, so that it goes on where it was interrupted.

    Args:
        corpus: of text.
        tokenizer: its name in a recipe.
        folder: an existing one, or a new one.
        num_workers: processes, a shard each.

    Returns:
        The YAML file, for `data.corpus`.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: a shard is missing or damaged, or the
            tokenizer cannot be had.
    """
    encoder = load_tokenizer(tokenizer)
    if any(shard.format == "tokens" for shard in (*corpus.train, *corpus.validation)):
        raise ValueError(f"corpus {corpus.name} is tokenised already")
    parts = {"train": corpus.train, "validation": corpus.validation}
    wanted = [
        (shard, folder / part / f"{index:05d}.bin")
        for part, shards in parts.items()
        for index, shard in enumerate(shards)
    ]
    for _, path in wanted:
        path.parent.mkdir(parents=True, exist_ok=True)
    work = partial(tokenize_shard, tokenizer)
    bar = tqdm(total=len(wanted), unit="shard", desc=f"{corpus.name}, {tokenizer}")
    tokens = documents = 0
    with bar:
        for made in _run(
            work, [w for w in wanted if not is_whole(*w, encoder.identity)], num_workers
        ):
            tokens, documents = tokens + made.tokens, documents + made.documents
            bar.update()
            bar.set_postfix_str(f"{tokens:,} tokens, {documents:,} documents")
        bar.update(bar.total - bar.n)
    return _write_yaml(corpus, tokenizer, folder)


def _run(
    work: partial[Tokenised], wanted: list[tuple[Shard, Path]], num_workers: int
) -> Iterator[Tokenised]:
    if num_workers < 2:
        for shard, path in wanted:
            yield work(shard, path)
        return
    with ProcessPoolExecutor(num_workers, worker_context(), begin_worker) as pool:
        futures: list[Future[Tokenised]] = [pool.submit(work, *pair) for pair in wanted]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def tokenize_shard(tokenizer: str, shard: Shard, path: Path) -> Tokenised:
    """Writes one shard.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: as reading it does.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder, blocks = load_tokenizer(tokenizer), BlockCache(most_bytes=0)
    writer = TokenWriter(path, encoder.vocab_size)
    num_blocks = blocks.num_blocks(shard)
    block_sizes: list[int] = []
    documents = tokens = 0
    while num_blocks is None or len(block_sizes) < num_blocks:
        block = len(block_sizes)
        size = blocks.size(shard, block)
        if size is None:
            break
        for first in range(0, size, MOST_DOCUMENTS):
            rows = np.arange(first, min(first + MOST_DOCUMENTS, size))
            texts = blocks.documents(shard, block, rows)
            encoded = with_eot([text for text in texts if len(text)], encoder)
            for text in texts:
                ids = next(encoded) if len(text) else np.empty(0, np.int32)
                writer.add(ids)
                documents, tokens = documents + bool(len(ids)), tokens + len(ids)
        block_sizes.append(size)
    writer.finish(
        {
            "tokenizer": encoder.identity,
            "eot_id": encoder.eot_id,
            "text": shard.url,
            "identity": identity(shard),
            "stream": num_blocks is None,
            "block_sizes": block_sizes,
        }
    )
    return Tokenised(documents, tokens)


def is_whole(shard: Shard, path: Path, tokenizer: str) -> bool:
    """Whether a shard was written by an earlier call, of the same text and tokenizer."""
    try:
        about = read_about(path)
    except (FileNotFoundError, ValueError):
        return False
    return about["tokenizer"] == tokenizer and about["identity"] == identity(shard)


def _write_yaml(corpus: Corpus, tokenizer: str, folder: Path) -> Path:
    content: dict[str, object] = {
        "description": f"{corpus.name}, tokenised by {tokenizer} (sparsellm data tokenize)",
        "source": "files",
        "files": ["${CORPUS_DIR}/train/*.bin"],
    }
    if corpus.validation:
        content["validation_files"] = ["${CORPUS_DIR}/validation/*.bin"]
    path = folder / f"{corpus.name}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path
