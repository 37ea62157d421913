#!/bin/sh
# Question: the tokenizers of Llama 2 and Gemma have byte_fallback and 256 tokens for bytes, so that every text has
#   tokens. A vocabulary for another corpus is trained from one, by transformers' tokenizer.train_new_from_iterator(texts,
#   size). What does it make of a digit or capital that the corpus does not have?
# Guess: tokens for its bytes, as before. The method trains "with the same defaults (in terms of special tokens or
#   tokenization pipeline) as the current one".
# Seen (transformers 5.23.0, tokenizers 0.23.3): with LlamaTokenizer, nothing: "sum 12.5 Q" is decoded as "sum" and
#   spaces, and with GemmaTokenizer, it is "sum <unk> <unk>". byte_fallback is still set, but the new vocabulary has no
#   tokens for bytes, and without them it does nothing. All 256 have to be listed, as new_special_tokens=["<0x00>", …]. A
#   Unigram model loses the setting too, so that even that does not help.
# Hurts: tokenizers for a language or for code that are trained from a known one on a sample: what the sample lacks is
#   lost from the corpus and from prompts, though the tokenizer they come from could encode every text.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3
fi
HF_HUB_OFFLINE=1 "$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import json
import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
rest = [*byte_tokens, "▁", *string.ascii_lowercase]
llama = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *rest])}
gemma = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *rest])}

unigram = Tokenizer(models.Unigram([(token, -10.0) for token in llama], unk_id=0, byte_fallback=True))
unigram.pre_tokenizer = pre_tokenizers.Metaspace()
parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
unigram.decoder = decoders.Sequence(parts)

corpus = ["the sum of two numbers is a number", "to be or not to be"] * 100
text = "sum 12.5 Q"
tokenizers = {
    "LlamaTokenizer": (LlamaTokenizer(vocab=llama, merges=[]), True, ""),
    "GemmaTokenizer": (GemmaTokenizer(vocab=gemma, merges=[]), True, "<unk>"),
    "Unigram": (PreTrainedTokenizerFast(tokenizer_object=unigram, unk_token="<unk>"), False, "<unk>"),
}


def describe(tokenizer):
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    count = sum(token in tokenizer.get_vocab() for token in byte_tokens)
    print(f"  {decoded!r}; {count} byte tokens, byte_fallback={model['byte_fallback']}")
    return decoded.strip(), count, model["byte_fallback"]


for name, (old, kept, unknown) in tokenizers.items():
    print(f"{name}: before, trained from it, trained with the byte tokens listed")
    assert describe(old) == (text, 256, True)
    expected = f"sum {unknown} {unknown}".strip()
    assert describe(old.train_new_from_iterator(corpus, 400)) == (expected, 0, kept), "the behaviour has changed"
    decoded, *state = describe(old.train_new_from_iterator(corpus, 400, new_special_tokens=byte_tokens))
    assert state == [256, kept] and (decoded == text) == kept, "the behaviour has changed"
PY
