#!/bin/sh
# Question: wds.WebDataset(urls, shardshuffle=100) shuffles the order of the shards. Is it another order in each epoch?
# Guess: yes, as wds.shuffle among samples gives. With detshuffle=True too, by its seed and the number of the epoch.
# Seen (webdataset 1.0.2): no. A WebDataset draws one seed when it is made, and shuffles the shards with it anew in each
#   epoch, so all epochs have one order; only another process or object has another. The stage wds.shuffle in a
#   DataPipeline has a new order each time. detshuffle=True counts epochs, but in the workers of a DataLoader the count
#   begins again in each epoch, unless persistent_workers=True: the same order again.
# Hurts: training for several epochs. Samples of the same shards meet in the same batches, but for the small buffer of
#   .shuffle(…), and a curriculum by accident is the same in each epoch. The losses of an epoch look like the last one's.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile webdataset==1.0.2 torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import webdataset as wds
from torch.utils.data import DataLoader

folder = sys.argv[1]
for shard in range(8):
    with wds.TarWriter(f"{folder}/{shard}.tar") as writer:
        writer.write({"__key__": f"sample{shard}", "txt": str(shard)})
urls = f"{folder}/{{0..7}}.tar"


def text(sample):
    return sample["txt"].decode()


def orders(name, dataset, **options):
    loader = DataLoader(dataset, batch_size=None, **options)
    epochs = ["".join(loader) for _ in range(4)]
    print(f"{name}: shards in four epochs: {epochs}")
    assert all(sorted(epoch) == list("01234567") for epoch in epochs)
    return len(set(epochs))


pipeline = wds.DataPipeline(wds.SimpleShardList(urls), wds.shuffle(100), wds.tarfile_to_samples(), wds.map(text))
assert orders("DataPipeline with wds.shuffle", pipeline) > 1
plain = wds.WebDataset(urls, shardshuffle=100).map(text)
assert orders("shardshuffle=100", plain) == 1, "the behaviour has changed"
assert orders("shardshuffle=100, 2 workers", plain, num_workers=2) == 1, "the behaviour has changed"
counted = wds.WebDataset(urls, shardshuffle=100, detshuffle=True).map(text)
assert orders("detshuffle=True", counted) > 1
counted = wds.WebDataset(urls, shardshuffle=100, detshuffle=True).map(text)
workers = {"num_workers": 2}
assert orders("detshuffle=True, 2 workers", counted, **workers) == 1, "the behaviour has changed"
assert orders("detshuffle=True, 2 persistent workers", counted, **workers, persistent_workers=True) > 1
PY
