#!/bin/sh
# Question: DataLoaderConfiguration(even_batches=False) says not to repeat samples where the last batch does not divide by
#   the number of processes. Does an evaluation that adds up losses and rows over processes count each row once?
# Guess: yes, for every kind of dataset, or accelerate refuses.
# Seen (accelerate 1.15.0, torch 2.13.0, gloo, two CPU processes): only for datasets with a length. With an IterableDataset,
#   or with dispatch_batches=True, the setting is ignored without a message: the last batch is filled up with the first
#   rows. 13 rows are counted as 14, and a stream of one row as two; with 8 processes up to 7 rows are counted again.
#   Of joining uneven inputs, accelerate warns about just this; the configuration does not.
# Hurts: validation on streams with own sums (loss, tokens, right answers): the first rows weigh more, and the result
#   depends on the number of processes. gather_for_metrics() drops the copies.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
fi
cat > "$dir/check.py" <<'PY'
import warnings

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

warnings.simplefilter("error")


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from ((torch.tensor(row),) for row in range(self.rows))


def counted(accelerator, dataset):
    """Rows that all processes see together."""
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4))
    seen = sum(len(rows) for (rows,) in loader)
    return accelerator.reduce(torch.tensor(seen), "sum").item()


found = {}
for dispatch in (None, True):
    configuration = DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    for rows in (13, 1):
        for name, dataset in (("with a length", TensorDataset(torch.arange(rows))), ("stream", Stream(rows))):
            found[name, dispatch, rows] = counted(accelerator, dataset)
            accelerator.print(f"dataset {name}, dispatch_batches={dispatch}: {rows} rows are counted as "
                              f"{found[name, dispatch, rows]}")
for (name, dispatch, rows), count in found.items():
    if name == "with a length" and not dispatch:
        assert count == rows
    else:
        assert count == rows + 1, "the behaviour has changed"
accelerator.end_training()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
