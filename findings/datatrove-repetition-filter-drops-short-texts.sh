#!/bin/sh
# Question: datatrove's GopherRepetitionFilter, with its defaults, removes repetitive documents. Which texts of different
#   words, none of which occurs twice, does it remove?
# Guess: none. A text of 20 words in which nothing repeats passes every limit on repetition.
# Seen (datatrove 0.10.1): all of up to 10 words, 82% of 20 words and 20% of 28 words. The filter takes the most common
#   2-, 3- and 4-gram, even if each occurs only once, and compares its share of the characters with 20%, 18% and 16%. The
#   reason that is given is top_2_gram, top_3_gram or top_4_gram. Gopher's rules also drop documents of under 50 words, so
#   these limits did no harm there; here they are two filters, and either can be used without the other. Repeated 5- to
#   10-grams are counted from the second time on, so those limits pass such texts.
# Hurts: captions, questions with answers, chats and translations, of which most are dropped; and tables of reasons, in
#   which short pages count as repetitive where this filter comes before the one of lengths. top_n_grams=() turns the
#   limits off.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 nltk==3.10.4 spacy==3.8.18 tldextract==5.4.0 \
    tokenizers==0.23.3 xxhash==3.6.0 numpy==2.4.6
fi
"$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import random
from collections import Counter

from datatrove.data import Document
from datatrove.pipeline.filters import GopherRepetitionFilter

random.seed(0)
defaults, without = GopherRepetitionFilter(), GopherRepetitionFilter(top_n_grams=())


def verdict(words, which=defaults):
    result = which.filter(Document(text=" ".join(words) + ".", id="0"))
    return "kept" if result is True else result[1]


dropped = {}
for length in (5, 10, 15, 20, 22, 24, 26, 28, 30, 40):
    texts = []
    for _ in range(200):
        words = {"".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 9))) for _ in range(2 * length)}
        texts.append(random.sample(sorted(words), length))
    reasons = Counter(verdict(words) for words in texts)
    dropped[length] = 1 - reasons["kept"] / len(texts)
    print(f"{length} different words: {dropped[length]:.0%} of 200 texts dropped, {dict(reasons)}")
    assert all(verdict(words, without) == "kept" for words in texts)
question = "What is the capital of France? It is Paris".split()
print("a question with its answer:", verdict(question))
assert verdict(question) == "top_3_gram", "the behaviour has changed"
assert dropped[5] == dropped[10] == 1 and dropped[20] > 0.7 and dropped[28] > 0.1, "the behaviour has changed"
assert dropped[40] == 0
PY
