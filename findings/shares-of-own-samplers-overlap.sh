#!/bin/sh
# Question: a DataLoader with an own sampler, which draws its order with np.random or torch.randperm, is given to
#   accelerate's prepare on two processes. Does every row get to one of them?
# Guess: yes, each to exactly one. prepare divides the sampler's batches among the processes.
# Seen (accelerate 1.15.0): no. Each process runs its own sampler and takes every second batch of it, and the orders
#   differ unless the random numbers of the processes agree. Of 400 rows, about 300 are read in an epoch, 100 of them by
#   both. That is so without a seed, and with set_seed(42, device_specific=True), which is meant for noise that
#   differs between processes. With set_seed(42) alone, shares are disjoint until one process draws a number more than the
#   other. shuffle=True is right in all cases, since accelerate synchronises the sampler that it makes. There is no message.
# Hurts: weighted, curriculum and length-grouped samplers: a quarter of the rows of each epoch is not seen, with many
#   processes 37%, and others count several times; evaluations count rows twice. Give the sampler a seed of its own.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
fi
cat > "$dir/check.py" <<'PY'
import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Sampler


class Own(Sampler):
    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return iter(self.draw(400).tolist())

    def __len__(self):
        return 400


accelerator = Accelerator(cpu=True)
samplers = {
    "np.random.permutation": Own(np.random.permutation),
    "torch.randperm": Own(torch.randperm),
    "shuffle=True": None,
}
seen = {}
for name, sampler in samplers.items():
    for seed, options in {"no seed": None, "one seed": {}, "device_specific": {"device_specific": True}}.items():
        if options is not None:
            set_seed(42, **options)
        loader = DataLoader(range(400), batch_size=4, sampler=sampler, shuffle=sampler is None)
        rows = [int(row) for batch in accelerator.prepare(loader) for row in batch]
        both = [None, None]
        dist.all_gather_object(both, rows)
        seen[name, seed] = len(set(both[0]) | set(both[1])), len(set(both[0]) & set(both[1]))
        if accelerator.is_main_process:
            print(f"{name}, {seed}: {seen[name, seed][0]} of 400 rows are read, {seen[name, seed][1]} by both processes")
for (name, seed), (read, _) in seen.items():
    if name == "shuffle=True" or seed == "one seed":
        assert read == 400
    else:
        assert 250 < read < 350, "the behaviour has changed"
dist.barrier()
dist.destroy_process_group()
PY
"$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
