#!/bin/sh
# Question: datatrove's SingleBloomFilter removes near-duplicates. It has 2^20 bytes and gets 200 unrelated documents of 100
#   random words, fewer 13-grams than its expected_elements=20,000. How many documents does it keep?
# Guess: 200. It logs a false positive probability of about 0, for 420 bits per element.
# Seen (datatrove 0.10.1): 1. The position of a bit is hash & m_bytes where hash % (8 * m_bytes) is meant: of 8,388,608
#   bits only those can be reached whose number has no bit outside of m_bytes: 2 for a power of two, 128 for 1,000,000.
#   The first document sets them all, and all other documents count as its copies. The default of k is also eightfold,
#   since a size in bits is passed as bytes. With m_bytes=2^20 - 1 and an explicit k, an eighth of the filter is used and
#   all are kept: the authors' test of it has 2^10 - 1. Documents of under 13 words have no 13-gram and are all kept, copies
#   too. Each removed document counts twice as "dropped".
# Hurts: corpora deduplicated by it: nearly all of a shard is removed, with no error and a reassuring log. Its log
#   of a false positive probability does not look at the filter.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 nltk==3.10.4 spacy==3.8.18 tldextract==5.4.0 \
    tokenizers==0.23.3 xxhash==3.6.0 numpy==2.4.6
fi
"$PYTHON" - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import random
import sys

from datatrove.data import Document
from datatrove.pipeline.dedup.bloom_filter import BloomFilterConfig, SingleBloomFilter, get_false_positive_prob

random.seed(0)
words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(5000)]


def documents(number, length):
    return [Document(text=" ".join(random.choices(words, k=length)), id=str(i)) for i in range(number)]


unrelated = documents(200, 100)
kept = {}
for m_bytes, k in [(2**20, None), (2**20, 7), (1_000_000, 7), (2**20 - 1, 7)]:
    config = BloomFilterConfig(m_bytes=m_bytes, k=k, expected_elements=20_000)
    bloom = SingleBloomFilter(sys.argv[1], config)
    kept[m_bytes, k] = len(list(bloom.run(iter(unrelated))))
    ones = sum(byte.bit_count() for byte in bloom.bit_vector)
    chance = get_false_positive_prob(m_bytes, bloom.total_shingles, config.k)
    print(f"{m_bytes:,} bytes, k = {k or f'default ({config.k})'}: {kept[m_bytes, k]} of 200 kept, ", end="")
    print(f"{ones:,} bits set, logged probability {chance:.1g}")
    dropped = bloom.stats["dropped"].total
    assert dropped == 2 * (200 - kept[m_bytes, k]), "the behaviour has changed"
short = documents(20, 5)
kept_short = len(list(bloom.run(iter(short + short))))
print(f"documents of 5 words, each twice: {kept_short} of 40 kept")
assert kept_short == 40
assert kept.pop((2**20 - 1, 7)) == 200
assert set(kept.values()) == {1}, "the behaviour has changed"
PY
