#!/bin/sh
# Question: a corpus is prepared as corpus.bin and corpus.idx by megatron-core, and a run reads it with GPTDataset. Later
#   the corpus is prepared again under the same name, with four times as many documents. What does the next run read?
# Guess: the new corpus. The documents and their order are taken from the files.
# Seen (megatron-core 0.16.1): the first quarter of it, in the old order. GPTDataset stores its index of documents and
#   samples on disk, by default in the folder corpus/cache beside the data, under a hash of the name, the split, the
#   sequence length, the number of samples and the seed, but of nothing in the data. The next run finds it, so no document
#   that was added is ever read. Another seed or number of samples, or removing the cache, reads all. There is no message.
# Hurts: corpora that grow, or are filtered and prepared again: a run on the new corpus with the same settings, as an
#   ablation needs them, reads by the index of the old one.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 megatron-core==0.16.1
fi
cd "$dir"
"$PYTHON" -W ignore - <<'PY'
import logging
import pathlib
import shutil

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

logging.disable(logging.WARNING)
TOKENS = 40  # of a document


class Tokenizer:
    vocab_size, eod, pad = 50_304, 50_256, 50_257
    unique_identifiers = {"name": "gpt2"}


def prepare(documents):
    """Writes documents; all tokens of document i are i, so that a token says where it is from."""
    builder = IndexedDatasetBuilder("corpus.bin", dtype=np.uint16)
    for document in range(documents):
        builder.add_document(torch.full((TOKENS,), document), [TOKENS])
    builder.finalize("corpus.idx")


def documents_read(samples, seed=1):
    """How many documents a run reads."""
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=16, blend=(["corpus"], None), split="1,0,0", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]
    return len({int(token) for i in range(len(dataset)) for token in dataset[i]["tokens"]})


def report(name, count):
    print(f"{name}: {count} documents are read")
    return count


samples = 400 * TOKENS // 16 - 1
prepare(100)
assert report("100 documents", documents_read(samples)) == 100
prepare(400)
stale = report("400 documents under the same name", documents_read(samples))
other = report("with another seed", documents_read(samples, seed=2))
caches = [path for path in pathlib.Path().rglob("cache") if path.is_dir()]
print("the cache:", *caches)
for cache in caches:
    shutil.rmtree(cache)
fresh = report("with the first seed, after its cache is removed", documents_read(samples))
assert other == fresh == 400
assert stale == 100, "the behaviour has changed"
PY
