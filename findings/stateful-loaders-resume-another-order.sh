#!/bin/sh
# Question: torchdata's StatefulDataLoader reads with a sampler of torch that has its own generator, such as
#   SubsetRandomSampler(train_rows, generator=…) for a split. In the second epoch, state_dict() is saved. A new process
#   makes the same loader and loads the state. Does it read the rest of the epoch?
# Guess: yes, as with shuffle=True.
# Seen (torchdata 0.11.0, torch 2.13.0): it reads as many rows as are left, but the last ones of the first epoch's order.
#   Of 1,000 rows, half of them read, 235 come twice in this epoch, and 235 not at all; with torch's RandomSampler, alone or
#   in a BatchSampler, 259. There is no message. The state counts the rows of a sampler that has no state_dict, and the new
#   sampler draws with a generator that is at its first epoch. shuffle=True makes a sampler of torchdata, which saves its
#   generator.
# Hurts: runs that resume in a later epoch, once for each interruption: their epochs are not epochs. Seed the generator by
#   the epoch before the state is loaded, as set_epoch of DistributedSampler does, or use torchdata's RandomSampler.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torchdata==0.11.0 torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/resume.py" <<'PY'
import importlib.metadata
from itertools import islice

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

rows = list(range(1000))


def loader(name, workers):
    generator = torch.Generator().manual_seed(0)
    options = {
        "shuffle=True": lambda: {"shuffle": True, "generator": generator, "batch_size": 5},
        "torchdata's RandomSampler": lambda: {"sampler": StatefulRandomSampler(rows, generator=generator), "batch_size": 5},
        "SubsetRandomSampler": lambda: {"sampler": SubsetRandomSampler(rows, generator=generator), "batch_size": 5},
        "torch's RandomSampler": lambda: {"sampler": RandomSampler(rows, generator=generator), "batch_size": 5},
        "BatchSampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(rows, generator=generator), 5, False)},
    }[name]()
    return StatefulDataLoader(rows, num_workers=workers, **options)


def read(batches):
    return [int(row) for batch in batches for row in batch]


def twice(name, workers):
    """How many rows come twice in the second epoch, if it is resumed in the middle."""
    first = loader(name, workers)
    read(first)
    batches = iter(first)
    before = read(islice(batches, 100))
    state = first.state_dict()
    rest = read(batches)
    resumed = loader(name, workers)
    resumed.load_state_dict(state)
    after = read(resumed)
    assert len(after) == len(rest) == 500
    repeated = len(set(before) & set(after))
    never = len(rows) - len(set(before) | set(after))
    print(f"{name}, {workers} workers: the same rest {after == rest}, {repeated} rows twice, {never} never")
    return repeated


if __name__ == "__main__":
    print("torchdata", importlib.metadata.version("torchdata"), "torch", torch.__version__)
    for workers in (0, 2):
        assert twice("shuffle=True", workers) == twice("torchdata's RandomSampler", workers) == 0
        for name in ("SubsetRandomSampler", "torch's RandomSampler", "BatchSampler"):
            assert twice(name, workers) > 200, "the behaviour has changed"
PY
"$PYTHON" -W ignore "$dir/resume.py"
