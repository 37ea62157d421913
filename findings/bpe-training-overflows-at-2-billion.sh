#!/bin/sh
# Takes four minutes.
#
# Question: BpeTrainer merges the most frequent pair first. The pair (a, b) occurs more than 2^31 = 2.15 billion times,
#   and (c, d) ten times less often. Which is merged?
# Guess: (a, b); counts have 64 bits.
# Seen (tokenizers 0.23.3): (c, d). Counts of pairs have 32 bits with a sign: beyond 2^31 a count becomes negative, and
#   the most frequent pair is not merged at all. With 2.1 billion occurrences, (a, b) is merged. There is no warning.
#   The defect has been reported to tokenizers' authors.
# Hurts: tokenizers trained on large corpora. In Python code, one byte in eight begins a pair of two spaces, which makes
#   2^31 pairs in 18 GB; in English, " t" needs 91 GB (counted on 2 MB and 17 MB, with GPT-2's pattern). The pairs that
#   save most tokens are the ones that are lost.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile tokenizers==0.23.3
fi
"$PYTHON" - <<'PY'
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

line = "ab" * 5000 + " " + "cd" * 500
seen = {}
for lines in (420_000, 440_000):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=6, show_progress=False)  # four letters and two merges
    batches = ([line] * 1000 for _ in range(lines // 1000))
    tokenizer.train_from_iterator(batches, trainer)
    seen[lines] = set(tokenizer.get_vocab()) - set("abcd")
    print(f"{5000 * lines:,} times (a, b), {500 * lines:,} times (c, d): merged {sorted(seen[lines])}", flush=True)
assert "ab" in seen[420_000]
assert seen[440_000] == {"cd", "cdcd"}, "the behaviour has changed"
PY
