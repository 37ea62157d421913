#!/bin/sh
# Question: tokie, "100% accurate" by its description, encodes text with tokenizer.json files that Hugging Face's tokenizers
#   has trained. Are the tokens those of tokenizers? Is the text at least all there?
# Guess: yes, both; or it refuses a kind that it does not know, as gigatoken does.
# Seen (tokie 0.1.4, tokenizers 0.23.3): for byte-level BPE without settings, yes. With byte fallback, as in Llama 2, text
#   with a character outside the vocabulary is lost, with its neighbours: 30 copies of a function of two lines, whose
#   brackets and line breaks are such characters, become no token at all instead of 451, and "the text, Привет, мир, and so
#   on" becomes "the text, ,, ,, ,, , and and so onn". add_prefix_space=True is ignored, so that the first word has other
#   tokens. Nothing is raised. gigatoken 0.10.0 and kitoken 0.11.1 give the tokens of tokenizers in all six cases.
# Hurts: corpora that are tokenised by tokie for speed: documents get shorter or vanish, and the counts of tokens look like
#   a better compression. Decode a sample, and compare it with the text.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile tokie==0.1.4 tokenizers==0.23.3 gigatoken==0.10.0 kitoken==0.11.1
fi
"$PYTHON" -W error - "$dir" <<'PY'
import importlib.metadata
import json
import pydoc_data.topics
import re
import sys

import gigatoken
import kitoken
import tokie
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

names = ("tokie", "tokenizers", "gigatoken", "kitoken")
print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
# English of Python's own documentation, letters and punctuation only.
english = [re.sub(r"[^A-Za-z,. ]+", " ", text) for text in pydoc_data.topics.topics.values()]
english = [re.sub(r" +", " ", text).strip()[:5000] for text in english]
sentence = "the function returns the value of the expression, and the class is the type of the object."


def fallback(metaspace):
    """BPE with byte fallback, as in the files of Llama 2; with Metaspace, as in newer ones."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])  # fmt: skip
    reserved = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=2000, special_tokens=reserved, show_progress=False)
    tokenizer.train_from_iterator(english, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:1]  # the bytes are plain tokens of the vocabulary, as in Llama 2
    return json.dumps(state)


def byte_level(prefix):
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(english, trainer)
    return tokenizer.to_str()


code = "def value(x):\n    return the expression\n" * 30
cases = {
    "byte-level": (byte_level(False), sentence, True),
    "byte fallback, known characters": (fallback(False), sentence, True),
    "byte fallback": (fallback(False), code, False),
    "byte fallback, Cyrillic": (fallback(False), "the text, Привет, мир, and so on", False),
    "byte fallback, Metaspace": (fallback(True), code, False),
    "add_prefix_space=True": (byte_level(True), sentence, False),
}
for name, (state, text, same) in cases.items():
    path = f"{sys.argv[1]}/tokenizer.json"
    with open(path, "w") as file:
        file.write(state)
    right = Tokenizer.from_file(path)
    ids = right.encode(text, add_special_tokens=False).ids
    assert list(gigatoken.Tokenizer.from_json(state).encode(text)) == ids
    assert list(kitoken.Kitoken.from_tokenizers(state.encode()).encode(text, False)) == ids
    got = list(tokie.Tokenizer.from_json(path).encode(text, add_special_tokens=False).ids)
    kept = right.decode(got)
    print(f"{name}: tokenizers {len(ids)} tokens, tokie {len(got)}, that decode to {kept[:60]!r}")
    assert right.decode(ids).strip() == text.strip()
    assert (got == ids) == same, "the behaviour has changed"
    if name.startswith("byte fallback") and not same:
        assert kept.strip() != text.strip() and "(x)" not in kept and "мир" not in kept, "the behaviour has changed"
PY
