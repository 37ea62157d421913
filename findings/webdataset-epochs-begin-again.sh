#!/bin/sh
# Question: 1,000 samples lie in ten shards. WebDataset(urls, shardshuffle=100).shuffle(50).with_epoch(300) sets an epoch of
#   300 samples. How many of the 1,000 does a run of ten epochs see?
# Guess: all, about three times each. An epoch is a name for 300 samples of a stream that goes on.
# Seen (webdataset 1.0.2): about 345, most of them ten times, and the others never. Each epoch begins anew at the first
#   shard and is cut after 300 samples. The shards have the same shuffled order in each epoch, so that it is the same three
#   shards; only shuffle(50), which looks 50 samples ahead, brings others in. Without shuffle(), it is the same 300 samples
#   ten times. The same holds for WebLoader(…).with_epoch(300), with which multi-worker training sets its number of steps.
#   There is no message; the documentation says "Change the epoch to return the given number of samples". resampled=True
#   draws shards anew with replacement, which goes on.
# Hurts: training with with_epoch(n) for n below the size of the data, as for a checkpoint or an evaluation every n samples:
#   the model sees the beginning of the data again and again. Use resampled=True, or an n that covers the data.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile webdataset==1.0.2 torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/epochs.py" <<'PY'
import sys
from collections import Counter

import webdataset
from webdataset import TarWriter, WebDataset, WebLoader

folder = sys.argv[1]
urls = f"{folder}/{{000..009}}.tar"


def samples(loader, epochs=10):
    """How often each sample comes in ten epochs, and how many samples an epoch has."""
    order = [[int(sample["__key__"]) for sample in loader] for _ in range(epochs)]
    return Counter(sum(order, [])), len(order[0])


if __name__ == "__main__":
    for shard in range(10):
        with TarWriter(f"{folder}/{shard:03d}.tar") as writer:
            for i in range(shard * 100, (shard + 1) * 100):
                writer.write({"__key__": f"{i:04d}", "txt": str(i)})
    print("webdataset", webdataset.__version__)
    seen = {}
    for name, loader in {
        "shardshuffle=100, shuffle(50)": WebDataset(urls, shardshuffle=100).shuffle(50).with_epoch(300),
        "shardshuffle=100": WebDataset(urls, shardshuffle=100).with_epoch(300),
        "WebLoader, 2 workers": WebLoader(
            WebDataset(urls, shardshuffle=100), batch_size=None, num_workers=2
        ).with_epoch(300),
        "resampled=True": WebDataset(urls, resampled=True).with_epoch(300),
        "whole epochs": WebDataset(urls, shardshuffle=100).with_epoch(1000),
    }.items():
        counts, size = samples(loader)
        seen[name] = len(counts)
        print(f"{name}: ten epochs of {size} samples; {len(counts)} different ones, "
              f"the most frequent {max(counts.values())} times")
    assert seen["whole epochs"] == 1000 and seen["resampled=True"] > 800
    assert seen["shardshuffle=100"] == 300 and seen["shardshuffle=100, shuffle(50)"] < 400, "the behaviour has changed"
    assert seen["WebLoader, 2 workers"] < 500, "the behaviour of loaders has changed"
PY
"$PYTHON" -W ignore "$dir/epochs.py" "$dir"
