"""Shards of token ids in Megatron-LM's indexed format, which the loader maps into memory.

``NAME.bin`` holds the ids of all documents one after the other, each ended by the tokenizer's
end-of-document id; ``NAME.idx`` says how many there are and where each begins. Megatron-LM, NeMo
and GPT-NeoX read and write the same. The format keeps documents apart, as the order of the stream
requires; a plain sequence of ids (nanoGPT's) does not. ``NAME.json`` is ours: it names the text and
the tokenizer of the shard and has the blocks of the text, so the stream is the same to the id.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsellm.data.text.identity import TOKENIZE_AGAIN, content_identity, read_about
from sparsellm.data.text.readers import Block, Rows, ShardReader
from sparsellm.data.text.shards import Shard
from sparsellm.data.tokenizer import Tokenizer, Tokens

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_KINDS: dict[int, Any] = {4: np.int32, 8: np.uint16}  # Megatron's codes


def smallest_kind(vocab_size: int) -> Any:
    """The smallest type of the format that holds all ids."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


class TokenReader(ShardReader):
    """An open shard of tokens; its mapping ends with the last array that uses it."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        path = Path(shard.url)
        self._begins, self._lengths, kind = read_index(path.with_suffix(".idx"))
        about = read_about(path)
        size = path.stat().st_size
        expected = int(self._lengths.sum()) * np.dtype(kind).itemsize
        if size != expected:
            raise ValueError(
                f"{path} has {size:,} bytes and its index says {expected:,}: {TOKENIZE_AGAIN}"
            )
        self._tokens = np.memmap(path, kind, "r") if size else np.empty(0, kind)
        self._rows = np.cumsum([0, *about["block_sizes"]])
        if self._rows[-1] != len(self._lengths):
            raise ValueError(f"{path.with_suffix('.json')} is not of {path}: {TOKENIZE_AGAIN}")
        # The text was a stream, whose blocks are read in their order: so are these.
        self.num_blocks = None if about["stream"] else len(about["block_sizes"])

    def read(self, block: int) -> _Tokens | None:
        if block >= len(self._rows) - 1:
            return None
        begin, end = self._rows[block], self._rows[block + 1]
        return _Tokens(self._tokens, self._begins[begin:end], self._lengths[begin:end])


class _Tokens(Block):
    num_bytes = 0  # the system's pages

    def __init__(
        self, tokens: NDArray[Any], begins: NDArray[np.int64], lengths: NDArray[np.int32]
    ) -> None:
        self._tokens, self._begins, self._lengths = tokens, begins, lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def documents(self, rows: Rows) -> list[Tokens]:
        begins = self._begins[rows].tolist()
        ends = (self._begins[rows] + self._lengths[rows]).tolist()
        return [self._tokens[b:e] for b, e in zip(begins, ends, strict=True)]


class TokenWriter:
    """Writes a shard; its ``.bin`` file has its name ``path`` once it is whole."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._kind = smallest_kind(vocab_size)
        self._lengths: list[int] = []
        self._file = self._partial(".bin").open("wb")

    def add(self, tokens: Tokens) -> None:
        """The next document: its ids with the end-of-document id, or none if it is empty.

        Raises:
            OSError: it cannot be written, such as to a full disk; names the file.
        """
        with named_errors(self._path):
            self._file.write(tokens.astype(self._kind).tobytes())
        self._lengths.append(len(tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return sum(self._lengths)

    def finish(self, about: dict[str, Any]) -> None:
        """Writes the index and what the shard is made of, and gives all files their names.

        Raises:
            OSError: as `add`.
        """
        with named_errors(self._path):
            self._finish(about)

    def _finish(self, about: dict[str, Any]) -> None:
        self._file.close()
        about = about | {"content": content_identity(str(self._partial(".bin")))}
        # An index of documents of one sequence each.
        code = next(code for code, kind in _KINDS.items() if kind is self._kind)
        counts = np.array(self._lengths, dtype=np.int32)
        ends = np.cumsum([0, *self._lengths], dtype=np.int64)
        with self._partial(".idx").open("wb") as file:
            file.write(_MAGIC + struct.pack("<QBQQ", _VERSION, code, len(counts), len(ends)))
            file.write(counts.tobytes() + (ends[:-1] * np.dtype(self._kind).itemsize).tobytes())
            file.write(np.arange(len(ends), dtype=np.int64).tobytes())
        self._partial(".json").write_text(json.dumps(about) + "\n", encoding="utf-8")
        for suffix in (".idx", ".bin", ".json"):  # the last says that all are there
            self._partial(suffix).replace(self._path.with_suffix(suffix))

    def _partial(self, suffix: str) -> Path:
        return self._path.with_name(f".tmp-{self._path.stem}{suffix}")


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Gives errors of writing a file its name, which those of a full disk lack, and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "the same command goes on once it can be written"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(path)) from error


def read_index(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int32], Any]:
    """First token and number of tokens of each document, and the type of the ids.

    Raises:
        FileNotFoundError, ValueError: it is missing or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {TOKENIZE_AGAIN}")
    data = path.read_bytes()
    head = len(_MAGIC) + struct.calcsize("<QBQQ")
    if len(data) < head or not data.startswith(_MAGIC):
        raise ValueError(f"{path} is not an index of Megatron-LM's format: {TOKENIZE_AGAIN}")
    version, code, count, _ = struct.unpack_from("<QBQQ", data, len(_MAGIC))
    if version != _VERSION or code not in _KINDS or len(data) < head + 12 * count:
        raise ValueError(f"{path} is damaged, or holds ids of another type: {TOKENIZE_AGAIN}")
    lengths = np.frombuffer(data, np.int32, count, head)
    begins = np.frombuffer(data, np.int64, count, head + 4 * count)
    return begins // np.dtype(_KINDS[code]).itemsize, lengths, _KINDS[code]


def check_tokenizer(shards: tuple[Shard, ...], tokenizer: Tokenizer) -> None:
    """Checks that shards of tokens were made by a tokenizer; shards of text pass.

    Raises:
        FileNotFoundError, ValueError: another tokenizer made one, or its ``.json``, which says so,
            is missing or damaged.
    """
    for shard in shards:
        if shard.format != "tokens":
            continue
        about = read_about(Path(shard.url))
        tokenizer_identity, eot_id = about["tokenizer"], about.get("eot_id", tokenizer.eot_id)
        if tokenizer_identity != tokenizer.identity:
            raise ValueError(
                f"{shard.url} was tokenised by {tokenizer_identity!r} and data.tokenizer is "
                f"{tokenizer.identity!r}; use the former, or run `sparsellm data tokenize` with "
                "the latter"
            )
        if eot_id != tokenizer.eot_id:
            raise ValueError(
                f"{shard.url}: documents end with id {eot_id}, those of data.tokenizer now with "
                f"{tokenizer.eot_id}: give the tokenizer its former eos_token, or {TOKENIZE_AGAIN}"
            )
