#!/bin/sh
# Question: a node has read a part of a MosaicML streaming data set into its local folder. The data set is then written
#   anew under the same remote path, with corrected documents. What does the next run on that node read?
# Guess: the new data set. The index is small and is fetched, and shards that no longer fit it are fetched again.
# Seen (mosaicml-streaming 0.13.0): a mixture. index.json and every shard that is there are kept, whatever the remote
#   folder holds, and only the missing shards are fetched. After 30 of 100 samples, the run reads 56 old and 44 new ones,
#   without a message, and another node, with an empty folder, reads only new ones. If all was read before, all stays old.
#   The number of samples is that of the old index.
# Hurts: runs on nodes that keep their disks, and on one's own machine: filters, deduplication or repairs that seem to
#   have no effect, ranks that read different versions, and texts twice or never if the order has changed. Give each
#   version a path of its own.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile mosaicml-streaming==0.13.0 transformers==4.57.6 torch==2.14.1 \
    torchvision==0.29.1
fi
cat > "$dir/read.py" <<'PY'
import importlib.metadata
import shutil
import sys
from pathlib import Path

import numpy as np
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

print("mosaicml-streaming", importlib.metadata.version("mosaicml-streaming"))
folder = Path(sys.argv[1])


def write(name, version):
    """A data set of 100 samples; each begins with the version."""
    shutil.rmtree(folder / name, ignore_errors=True)
    columns = {"tokens": "ndarray:int32"}
    with MDSWriter(out=str(folder / name), columns=columns, size_limit=4096) as writer:
        for number in range(100):
            writer.write({"tokens": np.array([version, number] * 16, np.int32)})


def read(local, samples=100):
    """The versions of the first samples."""
    clean_stale_shared_memory()
    remote, local = str(folder / "corpus"), str(folder / local)
    dataset = StreamingDataset(remote=remote, local=local, batch_size=1, predownload=1)
    versions = [int(sample["tokens"][0]) for sample, _ in zip(dataset, range(samples))]
    return {version: versions.count(version) for version in (1, 2)}


write("corpus", 1)
print("first run, 30 samples by version:", read("node0", 30))
write("corpus", 2)
old, new = read("node0"), read("node1")
print(f"after the data set was written anew: {old}; another node: {new}")
assert new == {1: 0, 2: 100}
assert min(old.values()) > 20, "the behaviour has changed"
PY
"$PYTHON" -W ignore "$dir/read.py" "$dir"
