#!/bin/sh
# Question: an olmo-core mixture takes 400,000 tokens of a file of 1.2 million, and as many of 1,200 small files. Its
#   setting `seed` is "used when sampling the actual instances to use from each source". Which part of the large file is
#   read, and is the mixture half and half?
# Guess: instances from all over the file, others for another seed; and yes, to 2%.
# Seen (ai2-olmo-core 3.0.0, torch 2.13.0): the first third of the file, in order, for every seed. Documents are drawn with
#   the seed, but of what is drawn only the number is used: the instances are counted off from the start of each file. And
#   if the small files have 500 tokens each, with a sequence length of 1,024, none of their tokens is read: a file shorter
#   than a sequence gives no instance, and the large file fills their half. There is no error, and the number of instances
#   is the one that was asked for. Files of 1,500 tokens come to 50%.
# Hurts: mixtures of sorted files (by quality, date, language or shard of a crawl): "a third of the source" is its head, in
#   every run, and repeating a study with other seeds repeats the same data. Sources in many small files vanish. Shuffle
#   before writing the files, write files of many sequences, and count by source what the loader gives. Pull request 448 of
#   OLMo-core calls the seed unused.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile ai2-olmo-core==3.0.0 torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/mix.py" <<'PY'
import importlib.metadata
import logging
import sys

import numpy as np
from olmo_core.data import TokenizerConfig
from olmo_core.data.numpy_dataset import NumpyFSLDatasetConfig
from olmo_core.data.source_mixture import SourceMixtureConfig, SourceMixtureDatasetConfig, SourceMixtureList

folder = sys.argv[1]
LENGTH, LARGE, FIRST_SMALL = 1024, 1_200_000, 20_000_000


def write(name, tokens, first):
    """A file whose tokens are numbered, with an end of document after each 250."""
    path = f"{folder}/{name}.npy"
    array = np.memmap(path, dtype=np.uint32, mode="w+", shape=(tokens,))
    array[:] = np.arange(first, first + tokens)
    array[249::250] = array[-1] = 0
    array.flush()
    return path


def read(name, large, small, seed):
    """The first token of each instance of a half-and-half mixture of 800,000 tokens."""
    sources = [SourceMixtureConfig("large", 0.5, large), SourceMixtureConfig("small", 0.5, small)]
    mixture = SourceMixtureDatasetConfig(
        source_list=SourceMixtureList(sources=sources),
        requested_tokens=800_000,
        global_batch_size=4 * LENGTH,
        seed=seed,
        render_tables=False,
        quiet=True,
    )
    tokenizer = TokenizerConfig(vocab_size=2**31, eos_token_id=0, pad_token_id=0)
    work = f"{folder}/work-{name}-{seed}"
    dataset = NumpyFSLDatasetConfig.from_src_mix(
        mixture, tokenizer=tokenizer, sequence_length=LENGTH, work_dir=work
    ).build()
    dataset.prepare()
    return np.array([int(dataset[i]["input_ids"][0]) for i in range(len(dataset))])


if __name__ == "__main__":
    logging.disable(logging.INFO)
    print("olmo-core", importlib.metadata.version("ai2-olmo-core"))
    large = [write("large", LARGE, 1)]
    seen = {}
    for name, files, tokens in (("1500", 400, 1500), ("500", 1200, 500)):
        small = [write(f"small-{tokens}-{i}", tokens, FIRST_SMALL + 10_000 * i) for i in range(files)]
        for seed in (0, 1):
            first = read(name, large, small, seed)
            of_large = first[first < FIRST_SMALL]
            seen[name, seed] = len(first), np.mean(first >= FIRST_SMALL), of_large.max()
            print(f"{files} small files of {tokens} tokens, seed {seed}: {len(first)} instances, "
                  f"{100 * seen[name, seed][1]:.0f}% of small files; of the large file, tokens {of_large.min():,} to "
                  f"{of_large.max() + LENGTH - 1:,}, in order {bool((np.diff(of_large) == LENGTH).all())}")
    for seed in (0, 1):
        assert abs(seen["1500", seed][1] - 0.5) < 0.02
        assert seen["1500", seed][2] < 0.4 * LARGE, "the whole file is read now"
        assert seen["500", seed][:2] == (seen["1500", seed][0], 0), "small files are read now"
PY
"$PYTHON" -W ignore "$dir/mix.py" "$dir" 2>&1 | grep -v '^$'
