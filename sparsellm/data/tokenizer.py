"""Tokenizers: tiktoken's GPT-2, and plain bytes for runs that must download nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

# tiktoken's regex runs out of stack at a million white-space characters in a row.
LONGEST_RUN = 500_000
# `\s` as that regex has it; Python's takes in four control characters more.
WHITE_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


class Tokenizer(Protocol):
    """Text to token ids. ``eot_id`` stands between documents."""

    name: str
    vocab_size: int  # unpadded
    eot_id: int

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        """Ids of each text, without ``eot_id``."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of some ids; ``eot_id`` is ``<|endoftext|>``."""
        ...

    def decode_bytes(self, tokens: list[int]) -> bytes:
        """Their UTF-8: a token can end inside a character."""
        ...


class GPT2Tokenizer:
    """tiktoken's ``gpt2``: 50,257 ids. A literal ``<|endoftext|>`` in a text is ordinary text."""

    name = "gpt2"

    def __init__(self) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except OSError as error:  # requests' and file errors alike
            raise ValueError(
                f"tiktoken could not get the GPT-2 vocabulary ({error}). Without a network, set "
                "TIKTOKEN_CACHE_DIR to a folder with tiktoken's two cached GPT-2 files"
            ) from error
        self.vocab_size = self._encoding.n_vocab
        self.eot_id = self._encoding.eot_token

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Tokens:
        parts = [self._encode_part(part) for part in cut_long_runs(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_part(self, text: str) -> Tokens:
        # An array straight from Rust; a list of Python ints would cost about as much again.
        try:
            tokens = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # lone surrogates, as tiktoken's own `encode` mends them
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            tokens = self._encoding.encode_to_numpy(text, disallowed_special=())
        return tokens.astype(np.int32)

    def decode(self, tokens: list[int]) -> str:
        return self._encoding.decode(tokens)

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return self._encoding.decode_bytes(tokens)

    @property
    def mergeable_ranks(self) -> dict[bytes, int]:
        """The id of each token's bytes, in the order of merging; without ``eot_id``."""
        # tiktoken has no public name for all of them at once.
        tokens = (self._encoding.decode_single_token_bytes(i) for i in range(self.eot_id))
        return {token: rank for rank, token in enumerate(tokens)}


def cut_long_runs(text: str, longest: int = LONGEST_RUN) -> Iterator[str]:
    """Parts of a text whose GPT-2 ids, joined, are the text's.

    None has more than ``longest`` white-space characters before another one: the cuts are before
    the last of such a run, where GPT-2's own pattern has one.
    """
    begin = 0
    if len(text) > longest:
        runs = rf"(?<!{WHITE_SPACE}){WHITE_SPACE}{{{longest + 1},}}+"
        for run in re.finditer(runs, text):
            if run.end() < len(text):  # at the end they stay together
                yield text[begin : run.end() - 1]
                begin = run.end() - 1
    yield text[begin:]


class ByteTokenizer:
    """UTF-8 bytes, 0 to 255, and ``<|endoftext|>`` = 256."""

    name = "bytes"
    vocab_size = 257
    eot_id = 256

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        encoded = (text.encode("utf-8", "replace") for text in texts)
        return [np.frombuffer(data, dtype=np.uint8).astype(np.int32) for data in encoded]

    def decode(self, tokens: list[int]) -> str:
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(b"<|endoftext|>" if t == self.eot_id else bytes([t]) for t in tokens)


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its recipe name.

    Raises:
        ValueError: unknown name, or tiktoken cannot download its vocabulary.
    """
    if name == "gpt2":
        return GPT2Tokenizer()
    if name == "bytes":
        return ByteTokenizer()
    raise ValueError(f"tokenizer {name!r} is unknown; valid are gpt2, bytes")
