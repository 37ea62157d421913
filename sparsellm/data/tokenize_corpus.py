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
from sparsellm.data.tokenizer import Tokenizer, load_tokenizer
from sparsellm.data.workers import begin_worker, worker_context

_HERE = "${CORPUS_DIR}/"


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
        FileNotFoundError, ValueError, ConnectionError: a shard is missing or damaged, the tokenizer
            cannot be loaded, or the folder holds another corpus.
    """
    encoder = load_tokenizer(tokenizer)
    if any(shard.format == "tokens" for shard in (*corpus.train, *corpus.validation)):
        raise ValueError(f"corpus {corpus.name} is tokenised already")
    if others := [p for p in folder.glob("*.yaml") if p.stem != corpus.name and _names_shards(p)]:
        raise ValueError(
            f"{folder} holds the tokens of another corpus ({others[0].name}), which those of "
            f"corpus {corpus.name} would replace: give another folder, or delete that one"
        )
    wanted = [
        (shard, folder / file)
        for part, shards in _parts(corpus).items()
        for shard, file in zip(shards, _files(part, shards), strict=True)
    ]
    for _, path in wanted:
        path.parent.mkdir(parents=True, exist_ok=True)
    work = partial(tokenize_shard, tokenizer)
    bar = tqdm(total=len(wanted), unit="shard", desc=f"{corpus.name}, {tokenizer}")
    tokens = documents = 0
    with bar:
        for made in _run(work, [w for w in wanted if not is_whole(*w, encoder)], num_workers):
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
    block_sizes: list[int] = []
    documents = tokens = 0
    for block, size in enumerate(blocks.sizes(shard)):
        block_sizes.append(size)
        for first in range(0, size, MOST_DOCUMENTS):
            rows = np.arange(first, min(first + MOST_DOCUMENTS, size))
            texts = blocks.documents(shard, block, rows)
            for ids in with_eot(texts, encoder):
                writer.add(ids)
                documents, tokens = documents + bool(len(ids)), tokens + len(ids)
    writer.finish(
        {
            "tokenizer": encoder.identity,
            "eot_id": encoder.eot_id,
            "text": shard.url,
            "identity": identity(shard),
            "stream": blocks.num_blocks(shard) is None,
            "block_sizes": block_sizes,
        }
    )
    return Tokenised(documents, tokens)


def is_whole(shard: Shard, path: Path, tokenizer: Tokenizer) -> bool:
    """Whether a shard was written by an earlier call, of the same text and tokenizer."""
    try:
        about = read_about(path)
    except (FileNotFoundError, ValueError):
        return False
    made_with = (about["tokenizer"], about.get("eot_id"))
    same_ids = made_with == (tokenizer.identity, tokenizer.eot_id)
    return same_ids and about["identity"] == identity(shard)


def _write_yaml(corpus: Corpus, tokenizer: str, folder: Path) -> Path:
    # Each file by its name: of an earlier call, for more text, there may be others.
    named = {part: [_HERE + file for file in _files(part, s)] for part, s in _parts(corpus).items()}
    content: dict[str, object] = {
        "description": f"{corpus.name}, tokenised by {tokenizer} (sparsellm data tokenize)",
        "source": "files",
        "files": named["train"],
    }
    if corpus.validation:
        content["validation_files"] = named["validation"]
    path = folder / f"{corpus.name}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def _parts(corpus: Corpus) -> dict[str, tuple[Shard, ...]]:
    return {"train": corpus.train, "validation": corpus.validation}


def _files(part: str, shards: tuple[Shard, ...]) -> list[str]:
    return [f"{part}/{index:05d}.bin" for index in range(len(shards))]


def _names_shards(path: Path) -> bool:
    """Whether a YAML file is one that `_write_yaml` wrote."""
    return f"{_HERE}train/" in path.read_text(encoding="utf-8", errors="replace")
