"""`sparsellm data tokenize`: a corpus as shards of token ids, and a YAML that names them."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import numpy as np
import yaml
from tqdm import tqdm

from sparsellm.data.stream import with_eot
from sparsellm.data.text.blocks import MOST_DOCUMENTS, BlockCache
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.identity import identity, read_about, text_bytes, written_since
from sparsellm.data.text.shards import Shard
from sparsellm.data.text.token_shards import TokenWriter, named_errors
from sparsellm.data.tokenizer import Tokenizer, load_tokenizer
from sparsellm.data.workers import begin_worker, worker_context

_HERE = "${CORPUS_DIR}/"


def tokenize(corpus: Corpus, tokenizer: str, folder: Path, num_workers: int) -> Path:
    """Writes ``folder/{train,validation}/00000.bin`` and so on, and ``folder/<corpus>.yaml``.

    The loader reads the same stream from them, to the id. Shards that are there already and whole
    are kept, so that it goes on where it was interrupted. ``tokenizer`` is its name in a recipe; a
    worker makes a shard. Returns the YAML file, for `data.corpus`.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: a shard is missing or damaged, the tokenizer
            cannot be loaded, or the folder holds another corpus.
    """
    encoder = load_tokenizer(tokenizer)
    if any(shard.format == "tokens" for shard in (*corpus.train, *corpus.validation)):
        raise ValueError(f"corpus {corpus.name} is tokenised already")
    if other_files := [
        p for p in folder.glob("*.yaml") if p.stem != corpus.name and _names_shards(p)
    ]:
        raise ValueError(
            f"{folder} holds the tokens of another corpus ({other_files[0].name}), which those of "
            f"corpus {corpus.name} would replace: give another folder, or delete that one"
        )
    named = {
        part: [f"{part}/{index:05d}.bin" for index in range(len(shards))]
        for part, shards in (("train", corpus.train), ("validation", corpus.validation))
    }
    paths = [folder / file for files in named.values() for file in files]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    every = list(zip((*corpus.train, *corpus.validation), paths, strict=True))
    left = [pair for pair in every if not is_whole(*pair, encoder)]
    with tqdm(total=len(every), unit="shard", desc=f"{corpus.name}, {tokenizer}") as bar:
        bar.update(len(every) - len(left))
        tokens = 0
        for num_tokens in _run(partial(tokenize_shard, tokenizer), left, num_workers):
            tokens += num_tokens
            bar.update()
            bar.set_postfix_str(f"{tokens:,} tokens")
    # Each file by its name: of an earlier call, for more text, there may be others.
    content: dict[str, object] = {
        "description": f"{corpus.name}, tokenised by {tokenizer} (sparsellm data tokenize)",
        "source": "files",
        "files": [_HERE + file for file in named["train"]],
    }
    if corpus.validation:
        content["validation_files"] = [_HERE + file for file in named["validation"]]
    written = folder / f"{corpus.name}.yaml"
    with named_errors(written):
        written.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return written


def _run(work: partial[int], pairs: list[tuple[Shard, Path]], num_workers: int) -> Iterator[int]:
    if num_workers < 2:
        yield from (work(*pair) for pair in pairs)
        return
    with ProcessPoolExecutor(num_workers, worker_context(), begin_worker) as pool:
        futures: list[Future[int]] = [pool.submit(work, *pair) for pair in pairs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def tokenize_shard(tokenizer: str, shard: Shard, path: Path) -> int:
    """Writes one shard; returns its number of tokens.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: as reading it does.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder, blocks = load_tokenizer(tokenizer), BlockCache(most_bytes=0)
    writer = TokenWriter(path, encoder.vocab_size)
    block_sizes = []
    for block, size in enumerate(blocks.sizes(shard)):
        block_sizes.append(size)
        for first in range(0, size, MOST_DOCUMENTS):
            rows = np.arange(first, min(first + MOST_DOCUMENTS, size))
            for ids in with_eot(blocks.documents(shard, block, rows), encoder):
                writer.add(ids)
    writer.finish(
        {
            "tokenizer": encoder.identity,
            "eot_id": encoder.eot_id,
            "text": shard.url,
            "identity": identity(shard),
            "text_bytes": text_bytes(shard),
            "stream": blocks.num_blocks(shard) is None,
            "block_sizes": block_sizes,
        }
    )
    return writer.num_tokens


def is_whole(shard: Shard, path: Path, tokenizer: Tokenizer) -> bool:
    """Whether a shard was written by an earlier call, of the same text and tokenizer."""
    try:
        about = read_about(path)
    except (FileNotFoundError, ValueError):
        return False
    tokenizer_ids = (about["tokenizer"], about.get("eot_id"))
    same_ids = tokenizer_ids == (tokenizer.identity, tokenizer.eot_id)
    # An edit of a large file may change no identity.
    is_older = written_since(shard, path.with_suffix(".json").stat().st_mtime)
    return same_ids and about["identity"] == identity(shard) and not is_older


def _names_shards(path: Path) -> bool:
    """Whether a YAML file is one that `tokenize` wrote."""
    return f"{_HERE}train/" in path.read_text(encoding="utf-8", errors="replace")
