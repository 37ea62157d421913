#!/bin/sh
# Question: a streaming dataset is divided over two processes with split_dataset_by_node, as the documentation of
#   datasets advises, and its loader is given to accelerator.prepare. Which rows are read?
# Guess: all, each once. Every process reads its own share.
# Seen (accelerate 1.15.0, datasets 5.2.0): only those of process 0, half of the rows. For iterable datasets, prepare by
#   default reads in process 0 and sends its batches to the others. The share of process 1 is never read. There is no
#   warning. Without split_dataset_by_node, all rows are read.
# Hurts: pretraining on streamed data with N processes: the run sees 1/N of the corpus, and repeats it N times as often.
#   Use one of the two, not both.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 accelerate==1.15.0 datasets==5.2.0
fi
cat > "$dir/check.py" <<'PY'
import datasets
import torch.distributed as dist
from accelerate import Accelerator
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
rows = datasets.Dataset.from_dict({"row": list(range(16))}).to_iterable_dataset(num_shards=4)
rows = rows.with_format("torch")
share = split_dataset_by_node(rows, accelerator.process_index, accelerator.num_processes)
seen = {}
for name, dataset in (("all rows", rows), ("split_dataset_by_node", share)):
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
    mine = [row for batch in loader for row in batch["row"].tolist()]
    ranks = [None, None]
    dist.all_gather_object(ranks, mine)
    seen[name] = sorted(ranks[0] + ranks[1])
    if accelerator.is_main_process:
        print(f"{name}: process 0 gets {ranks[0]}, process 1 gets {ranks[1]}")
assert seen["all rows"] == list(range(16))
assert len(set(seen["split_dataset_by_node"])) == 8, "the behaviour has changed"
dist.destroy_process_group()
PY
HF_HOME="$dir/cache" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
