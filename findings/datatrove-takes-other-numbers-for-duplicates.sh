#!/bin/sh
# Question: datatrove's MinHash removes near duplicates, as for FineWeb, with its default settings. A corpus has documents
#   with exercises in arithmetic, "17 + 25 = 42." and so on, all different. How many are kept?
# Guess: nearly all. Two documents share few of their 5-grams.
# Seen (datatrove 0.10.1): 1 of 100. Before it hashes, datatrove lower-cases texts, removes punctuation and replaces each
#   number by 0 (TextNormConfig, norm_numbers=True), so these documents are equal: "0 0 0 0 …". With
#   TextNormConfig(norm_numbers=False) all are kept. Two tables of results with the same headings are duplicates as well.
#   And copies of a document of fewer than five words (n_grams) are never removed: it has no 5-gram.
# Hurts: corpora with mathematics, tables, logs or generated exercises, which lose nearly all of these: only the share of
#   removed documents is reported. Models trained on them have seen little arithmetic. Deduplicate such sources with
#   norm_numbers=False.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 spacy==3.8.18 tokenizers==0.23.3 numpy==2.4.6 \
    xxhash==3.8.2 regex
fi
"$PYTHON" - "$dir" 2>"$dir/log" <<'PY' || { cat "$dir/log"; exit 1; }
import random
import shutil
import sys

from datatrove.data import Document
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.text import TextNormConfig


def kept(name, texts, **options):
    """How many of the texts datatrove's four steps keep."""
    folder = f"{sys.argv[1]}/minhash"
    config = MinhashConfig(**options)
    documents = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]
    MinhashDedupSignature(f"{folder}/signatures", config=config).run(iter(documents), rank=0, world_size=1)
    for bucket in range(config.num_buckets):
        MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config).run(
            None, rank=bucket, world_size=config.num_buckets
        )
    MinhashDedupCluster(f"{folder}/buckets", f"{folder}/remove", config=config).run(None)
    count = len(list(MinhashDedupFilter(f"{folder}/remove").run(iter(documents), rank=0, world_size=1)))
    shutil.rmtree(folder)
    print(f"{name}: {count} of {len(texts)} kept, {len(set(texts))} are different")
    return count


generator = random.Random(0)


def exercise():
    a, b = generator.randrange(100), generator.randrange(100)
    return f"{a} + {b} = {a + b}."


letters = "abcdefghijklmnopqrstuvwxyz"
words = [a + b + c for a in letters for b in letters for c in letters]
texts = [" ".join(generator.choices(words, k=100)) for _ in range(50)]
sums = [" ".join(exercise() for _ in range(30)) for _ in range(100)]
tables = ["\n".join(f"step {i} loss {generator.random():.3f}" for i in range(20)) for _ in range(50)]
short = [" ".join(generator.choices(words, k=4)) for _ in range(10)] * 5
assert kept("words, each document twice", texts * 2) == 50
exact = {"norm_config": TextNormConfig(norm_numbers=False)}
assert kept("arithmetic, norm_numbers=False", sums, **exact) == 100
assert kept("arithmetic", sums) == 1 and kept("tables of losses", tables) == 1, "the behaviour has changed"
assert kept("documents of 4 words, each five times", short) == 50, "short documents are deduplicated now"
PY
