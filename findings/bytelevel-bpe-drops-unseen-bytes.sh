#!/bin/sh
# Question: a byte-level BPE tokenizer (pre-tokenizer ByteLevel, as GPT-2) is trained on text with lower-case letters
#   and spaces only. What does it make of "The sum is 12.5"?
# Guess: tokens for every byte. Byte-level tokenizers have all 256 bytes, so no text is unknown.
# Seen (tokenizers 0.23.3): it drops what it has not seen. "The sum is 12.5" is decoded as "he sum is ". There is no
#   unknown token, no error and no warning. The alphabet is the one of the training text, unless the trainer gets
#   initial_alphabet=ByteLevel.alphabet().
# Hurts: tokenizers that are trained on a sample: capitals, digits, tabs or letters of other languages disappear from
#   the corpus later, and from prompts. Nothing shows it except the decoded text.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile tokenizers==0.23.3
fi
"$PYTHON" - <<'PY'
import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def round_trip(text, **options):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the quick brown fox jumps over the lazy dog and the sum is large"] * 1000
    assert set("".join(corpus)) <= set(string.ascii_lowercase + " ")
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=400, show_progress=False, **options))
    encoding = tokenizer.encode(text)
    decoded = tokenizer.decode(encoding.ids)
    print(f"{text!r}, {'whole' if options else 'default'} alphabet: {encoding.tokens}, decoded {decoded!r}")
    return decoded


text = "The sum is 12.5"
assert round_trip(text, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()) == text
assert round_trip(text) == "he sum is ", "the behaviour has changed"
PY
