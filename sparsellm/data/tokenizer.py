"""Tokenizers: tiktoken's GPT-2, any fast one of Hugging Face's, and plain bytes for runs that must
download nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import regex
from numpy.typing import NDArray

from sparsellm.recipe.vocabulary import (
    check_name,
    hf_end_of_document,
    read_tokenizer,
    tokenizer_file,
    vocab_size,
)

if TYPE_CHECKING:  # imported where it is needed
    import tokenizers

Tokens = NDArray[np.int32]
_SPACE = "\u2581"  # SentencePiece's mark of a space

# tiktoken's regex runs out of stack at a million white-space characters in a row.
LONGEST_RUN = 500_000
# A run of letters (digits, signs) is one word to GPT-2's pattern, and merging a word of n bytes
# takes tiktoken n log n with a large factor: minutes for 100 MB. No language has such words.
LONGEST_WORD = 10_000
# White space by that regex; Python's `\s` matches four more control characters.
WHITE_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


class Tokenizer(Protocol):
    """Text to token ids. ``eot_id`` stands between documents."""

    name: str  # in a recipe
    identity: str  # changes with the ids that it gives
    vocab_size: int  # unpadded
    eot_id: int
    begin_ids: list[int]  # what its folder puts before a text; without a folder, ``eot_id``

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        """Ids of each text, without ``eot_id``."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of some ids; ``eot_id`` is ``<|endoftext|>``."""
        ...

    def decode_bytes(self, tokens: list[int]) -> bytes:
        """Their UTF-8: a token can end inside a character, and may have a space after another."""
        ...


class GPT2Tokenizer:
    """tiktoken's ``gpt2``: 50,257 ids. A literal ``<|endoftext|>`` in a text is ordinary text."""

    name = identity = "gpt2"

    def __init__(self) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except OSError as error:  # requests' and file errors alike
            raise ValueError(
                f"tiktoken could not get the GPT-2 vocabulary ({_cause(error)}). Without a "
                "network, set TIKTOKEN_CACHE_DIR to a folder with tiktoken's two cached GPT-2 "
                "files, or take the tokenizer bytes, which needs none"
            ) from error
        self.vocab_size = self._encoding.n_vocab
        self.eot_id = self._encoding.eot_token
        self.begin_ids = [self.eot_id]

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
            text = without_surrogates(text)
            tokens = self._encoding.encode_to_numpy(text, disallowed_special=())
        return tokens.view(np.int32)  # of a document of 100 MB a copy is another 100 MB

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


def _cause(error: BaseException) -> str:
    """What the system said, such as ``Connection refused``, without what libraries add to it."""
    text, inner = str(error), error.__cause__ or error.__context__
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            text = inner.strerror
        inner = inner.__cause__ or inner.__context__
    return text


def without_surrogates(text: str) -> str:
    """A text whose lone surrogates are replaced, and pairs of them joined."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_long_runs(text: str, longest: int = LONGEST_RUN, word: int = LONGEST_WORD) -> Iterator[str]:
    """Parts of a text whose GPT-2 ids, joined, are the text's.

    No part has more than ``longest`` white-space characters before another character: such a run is
    cut before its last one, as by GPT-2's own pattern. Words of more than ``word`` characters are
    cut every ``word`` characters; they alone get other ids, which decode to the same text.
    """
    begin = 0
    if len(text) > min(longest, word):
        for end in sorted({*_white_space_cuts(text, longest), *_word_cuts(text, word)}):
            yield text[begin:end]
            begin = end
    yield text[begin:]


def _white_space_cuts(text: str, longest: int) -> Iterator[int]:
    runs = rf"(?<!{WHITE_SPACE}){WHITE_SPACE}{{{longest + 1},}}+"
    for run in re.finditer(runs, text):
        if run.end() < len(text):  # at the end they stay together
            yield run.end() - 1


def _word_cuts(text: str, word: int) -> Iterator[int]:
    # A quick check first: some stretch of half its length would have no space.
    half = max(word // 2, 1)
    stretches = range(0, len(text) - half + 1, half)
    if all(text.find(" ", begin, begin + half) >= 0 for begin in stretches):
        return
    kinds = (r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]")
    for run in regex.finditer(
        "|".join(f"(?<!{kind}){kind}{{{word + 1},}}+" for kind in kinds), text
    ):
        yield from range(run.start() + word, run.end(), word)


class ByteTokenizer:
    """UTF-8 bytes, 0 to 255, and ``<|endoftext|>`` = 256."""

    name = identity = "bytes"
    vocab_size = 257
    eot_id = 256
    begin_ids = [eot_id]  # noqa: RUF012 — never changed

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        encoded = (text.encode("utf-8", "replace") for text in texts)
        return [np.frombuffer(data, dtype=np.uint8).astype(np.int32) for data in encoded]

    def decode(self, tokens: list[int]) -> str:
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(b"<|endoftext|>" if t == self.eot_id else bytes([t]) for t in tokens)


class HFTokenizer:
    """A ``tokenizer.json`` used unchanged except for special tokens: none is added, and one that is
    spelt out in a text is ordinary text. Its end-of-document token stands between documents.

    Raises:
        FileNotFoundError, ValueError: its files cannot be loaded, or are damaged.
    """

    def __init__(self, name: str) -> None:
        import tokenizers

        path = tokenizer_file(name)
        self.name = name
        content = read_tokenizer(path)
        self.vocab_size = vocab_size(name)
        self.eot = hf_end_of_document(name)
        try:
            changed = without_special_pieces(content, self.eot)
            text = path.read_text(encoding="utf-8") if changed is content else json.dumps(changed)
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is damaged ({error})") from error
        decides = [
            changed.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")
        ]
        digest = hashlib.sha256(json.dumps(decides).encode())
        self.identity = f"hf {digest.hexdigest()[:16]}"
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self._byte_level = '"ByteLevel"' in json.dumps(content.get("decoder"))
        steps = [content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
        marks_spaces = _SPACE in json.dumps(steps, ensure_ascii=False)
        self._pieces_have_spaces = self._byte_level or marks_spaces
        eot_id = self._tokenizer.token_to_id(self.eot)
        if eot_id is None:
            raise ValueError(f"{path} has no token {self.eot!r}, its end-of-document token")
        self.eot_id = eot_id
        # Llama's has a beginning-of-text token of its own.
        self.begin_ids = added_ids(self._tokenizer)[0]

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # the library's word for a lone surrogate
            texts = [without_surrogates(text) for text in texts]
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def decode_bytes(self, tokens: list[int]) -> bytes:
        if not self._pieces_have_spaces:  # as WordPiece's, which have "##" where there is none
            return self.decode(tokens).encode()
        return b"".join(
            _piece_bytes(self._tokenizer.id_to_token(token) or "", self._byte_level)
            for token in tokens
        )


def added_ids(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer's post-processor puts before a text, and those after it."""
    # Any text will do that has a token; a vocabulary of words may lack the usual ones.
    for text in ("a", "1", *itertools.islice(tokenizer.get_vocab(with_added_tokens=False), 100)):
        try:
            encoding = tokenizer.encode(text)
        except Exception:
            continue
        if 0 in (mask := encoding.special_tokens_mask):
            return encoding.ids[: mask.index(0)], encoding.ids[len(mask) - mask[::-1].index(0) :]
    return [], []


def without_special_pieces(content: dict[str, Any], eot: str) -> dict[str, Any]:
    """What a ``tokenizer.json`` holds, so that no special token is found in a text.

    `encode_special_tokens` keeps the library from looking for special tokens, and ``eot``, the
    end-of-document token, is made one where it is added as an ordinary token. But many models have
    them in their vocabulary too. To a Unigram model they get a score that no split of a text into
    other pieces would choose. Where the vocabulary lacks a character of one, as T5's lacks ``<``,
    there is no such split, and what is unknown scores less still; and other models take a whole
    word if they know it. Such a token is cut after its first character before the model sees it.
    (One that is a single character cannot be cut.)
    """
    added = [
        entry | {"special": True} if entry["content"] == eot else entry
        for entry in content.get("added_tokens", ())
    ]
    changed = (
        content if added == content.get("added_tokens", []) else content | {"added_tokens": added}
    )
    special = {entry["content"] for entry in added if entry.get("special")} | {eot}
    model = content["model"]
    if model.get("type") == "Unigram":
        pieces = [[piece, -1e9 if piece in special else score] for piece, score in model["vocab"]]
        changed = changed | {"model": model | {"vocab": pieces}}
        letters = {piece for piece, _ in pieces if piece not in special}
        still_matched = {token for token in special if not letters.issuperset(token)}
    else:
        still_matched = special & _whole_words(model)
    cut_tokens = sorted(token for token in still_matched if len(token) > 1)
    if not cut_tokens:
        return changed
    pattern = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in cut_tokens)
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    before = content.get("pre_tokenizer")
    steps = before["pretokenizers"] if before and before["type"] == "Sequence" else [before]
    if cut in steps:  # it is an export of ours
        return changed
    steps = [step for step in (*steps, cut) if step]
    return changed | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def _whole_words(model: dict[str, Any]) -> set[str]:
    """The entries of a vocabulary that the model can give for a text that spells them out."""
    if model.get("type") != "BPE" or model.get("ignore_merges"):
        return set(model["vocab"])
    prefix = model.get("continuing_subword_prefix") or ""
    pairs = (p if isinstance(p, list) else p.split(" ", 1) for p in model.get("merges", ()))
    return {first + second.removeprefix(prefix) for first, second in pairs}


def _piece_bytes(piece: str, byte_level: bool) -> bytes:
    """The bytes that a piece of a Hugging Face vocabulary stands for."""
    if byte_level and all(letter in BYTES_OF_SPELLING for letter in piece):
        return bytes(BYTES_OF_SPELLING[letter] for letter in piece)
    if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE, " ").encode()


def byte_spelling() -> list[str]:
    """GPT-2's printable character for each byte: itself, or the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(substitutes)) for b in range(256)]


BYTES_OF_SPELLING = {letter: byte for byte, letter in enumerate(byte_spelling())}


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its recipe name.

    Raises:
        FileNotFoundError, ValueError: unknown name, or its files cannot be loaded.
    """
    if check_name(name) == "gpt2":
        return GPT2Tokenizer()
    return ByteTokenizer() if name == "bytes" else HFTokenizer(name)
