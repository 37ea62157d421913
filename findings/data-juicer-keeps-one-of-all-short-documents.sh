#!/bin/sh
# Question: Data-Juicer's document_minhash_deduplicator, with its defaults, gets 100 different short documents of one to
#   four words, such as answers or titles, and 100 unrelated Chinese texts of 80 characters. How many does it keep?
# Guess: all. Documents without shingles of five words have nothing to compare, so they stay.
# Seen (py-data-juicer 1.6.1): 1 of the 100 short ones, and 1 of the 100 Chinese ones. A document of fewer words than
#   window_size=5 has no shingle, all of these get the same empty signature, and all but the first are duplicates of it.
#   Words are what spaces divide, so that Chinese, Japanese or Thai text is a single word of any length. In a mixed corpus,
#   one document of all of these kinds is left. tokenization="punctuation" keeps 1 of 100 English texts that have no
#   punctuation. Only the number of documents that are kept shows it. tokenization="character" keeps all Chinese texts,
#   and 76 of the short ones.
# Hurts: corpora of dialogues, titles, captions and answers, and multilingual ones: the documentation recommends "space" for
#   English and "character" for Chinese, but does not say what becomes of the others. Set short documents aside, and divide
#   the corpus by language first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile py-data-juicer==1.6.1 aiohttp==3.14.5 ray==2.60.0 scipy==1.17.1 \
    numpy==2.4.6
fi
HF_HOME="$dir" "$PYTHON" -W ignore - <<'PY'
import importlib.metadata
import random

from datasets import Dataset, disable_progress_bars
from loguru import logger

logger.remove()
from data_juicer.core.data import NestedDataset  # noqa: E402
from data_juicer.ops.deduplicator.document_minhash_deduplicator import DocumentMinhashDeduplicator  # noqa: E402

logger.remove()
disable_progress_bars()
print("py-data-juicer", importlib.metadata.version("py-data-juicer"))
random.seed(0)
words = [f"{first}{second}{third}" for first in "bdfklmnprst" for second in "aeiou" for third in "bdfklmnprst"]
chinese = [chr(0x4E00 + i) for i in range(3000)]
corpora = {
    "short": [" ".join(random.sample(words, 1 + i % 4)) for i in range(100)],
    "Chinese": ["".join(random.choices(chinese, k=80)) + "。" for _ in range(100)],
    "English-like": [" ".join(random.choices(words, k=60)) for _ in range(100)],
}
corpora["mixed"] = sum(corpora.values(), [])


def keep(texts, **options):
    deduplicator = DocumentMinhashDeduplicator(**options)
    rows = NestedDataset(Dataset.from_dict({"text": texts})).map(deduplicator.compute_hash)
    return len(deduplicator.process(rows)[0])


kept = {}
for tokenization in ("space", "punctuation", "character"):
    for name, texts in corpora.items():
        kept[tokenization, name] = keep(texts, **({} if tokenization == "space" else {"tokenization": tokenization}))
        print(f"{tokenization}, {name}: {kept[tokenization, name]} of {len(set(texts))} different texts are kept")
assert kept["space", "English-like"] == kept["character", "Chinese"] == 100
assert kept["space", "short"] == kept["space", "Chinese"] == 1, "the behaviour has changed"
assert kept["space", "mixed"] == 101, "the behaviour has changed"
assert kept["punctuation", "English-like"] == 1, "the behaviour of punctuation has changed"
PY
