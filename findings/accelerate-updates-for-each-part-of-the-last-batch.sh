#!/bin/sh
# Question: batches are too large for memory, so each is split into four parts in the loop, and accelerate accumulates over
#   them: Accelerator(gradient_accumulation_steps=4), `for part in batch.split(2): with accelerator.accumulate(model): …`.
#   How many updates has an epoch of 8 batches?
# Guess: 8, one per batch. accumulate() counts its own calls.
# Seen (accelerate 1.15.0): 11. From the moment that the loader has handed out its last batch of an epoch, each call of
#   accumulate() is an update, so that no gradients are left over; the last batch is in four parts, and each makes an update
#   of its own, from a gradient divided by four. If a loader has one batch per epoch, as one of shards or of rollouts, there
#   is no accumulation at all. There is no message. GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
#   makes 8 updates.
# Hurts: loops that split their batches: Adam makes a full step for each quarter of the last batch, and the scheduler,
#   which counts updates, ends early: the rate is too small from the first epoch on.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
fi
"$PYTHON" - <<'PY'
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader, TensorDataset

PARTS, BATCH, BATCHES = 4, 8, 8


def updates(batches, epochs, **options):
    """The number of updates after each batch's parts, and the learning rate at the end, if it falls by 1 per update."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=100.0)
    rows = TensorDataset(torch.randn(BATCH * batches, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=BATCH))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / 100))
    counts = []
    for _ in range(epochs):
        for (batch,) in loader:
            counts.append(0)
            for part in batch.split(BATCH // PARTS):
                with accelerator.accumulate(model):
                    accelerator.backward(model(part).square().mean())
                    counts[-1] += accelerator.sync_gradients
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    return counts, optimizer.param_groups[0]["lr"]


counts, rate = updates(BATCHES, 2, gradient_accumulation_steps=PARTS)
print(f"two epochs of {BATCHES} batches: updates for each batch {counts}; the rate falls from 100 to {rate:g}")
single, _ = updates(1, 3, gradient_accumulation_steps=PARTS)
print(f"three epochs of one batch: updates for each batch {single}")
plugin = GradientAccumulationPlugin(num_steps=PARTS, sync_with_dataloader=False)
right, right_rate = updates(BATCHES, 2, gradient_accumulation_plugin=plugin)
print(f"sync_with_dataloader=False: updates for each batch {right}; the rate falls from 100 to {right_rate:g}")
assert right == [1] * (2 * BATCHES) and right_rate == 84
assert counts == ([1] * (BATCHES - 1) + [PARTS]) * 2 and rate == 78, "the behaviour has changed"
assert single == [PARTS] * 3, "the behaviour has changed"
PY
