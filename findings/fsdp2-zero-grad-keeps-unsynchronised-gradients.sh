#!/bin/sh
# Question: under FSDP2 (fully_shard), gradients are accumulated with set_requires_gradient_sync(False). A micro-batch is
#   to be dropped (its loss is NaN, or an epoch ends within a window), so optimizer.zero_grad() is called. What is the
#   next gradient?
# Guess: that of the next micro-batches alone. zero_grad() leaves no gradient, as under DDP with no_sync.
# Seen (torch 2.13.0, gloo, two CPU processes): the dropped gradient is in it. Until they are synchronised, FSDP2 keeps
#   gradients beside the parameters; parameter.grad is None, so zero_grad(), of the optimizer or the model, with either
#   value of set_to_none, clears nothing, and a norm or a check for NaN sees nothing. After one NaN, the next window is NaN.
# Hurts: loops that skip bad micro-batches, start a window anew, or leave the accumulation at the end of an epoch: data
#   that was dropped trains the model, or one NaN that was skipped destroys it. DDP and one GPU do what the loop says.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
torch.manual_seed(0)
inputs, targets = torch.randn(2, ranks, 6, 16), torch.randn(2, ranks, 6, 8)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def backward(model, batch, scale=1.0):
    (scale * mse_loss(model(inputs[batch, rank]), targets[batch, rank])).backward()


def gradient(model):
    whole = [getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)() for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in whole])


def expected(batches):
    model = build()
    for batch in batches:
        for which in range(ranks):
            (mse_loss(model(inputs[batch, which]), targets[batch, which]) / ranks).backward()
    return gradient(model)


def after_a_drop(kind, scale=1.0, set_to_none=True):
    """The gradient of micro-batch 1, after micro-batch 0 was accumulated and dropped."""
    model = fully_shard(build(), mesh=mesh) if kind == "FSDP2" else DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters())
    if kind == "FSDP2":
        model.set_requires_gradient_sync(False)
    with contextlib.nullcontext() if kind == "FSDP2" else model.no_sync():
        backward(model, 0, scale)
    optimizer.zero_grad(set_to_none)
    left = [parameter.grad for parameter in model.parameters() if parameter.grad is not None and set_to_none]
    assert not left
    if kind == "FSDP2":
        model.set_requires_gradient_sync(True)
    backward(model, 1)
    return gradient(model)


for kind in ("DDP", "FSDP2"):
    for set_to_none in (True, False):
        found = after_a_drop(kind, set_to_none=set_to_none)
        only, both = (((found - wanted).norm() / wanted.norm()).item() for wanted in (expected([1]), expected([0, 1])))
        if rank == 0:
            print(f"{kind}, set_to_none={set_to_none}: {only:.0%} from the new micro-batch's gradient, "
                  f"{both:.0%} from that of both")
        assert (only < 1e-5) if kind == "DDP" else (both < 1e-5 and only > 0.1), "the behaviour has changed"
    found = after_a_drop(kind, torch.nan)
    if rank == 0:
        print(f"{kind}, a NaN was dropped: the next gradient is", "NaN" if found.isnan().all() else "finite")
    assert found.isfinite().all() if kind == "DDP" else found.isnan().all(), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
