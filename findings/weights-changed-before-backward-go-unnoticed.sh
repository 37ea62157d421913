#!/bin/sh
# Question: a step has two losses with a forward pass each, and the optimizer steps after the first backward pass, before
#   the second. In one process and under DDP, PyTorch raises: a weight was "modified by an inplace operation". What
#   happens under FSDP2, and with activation checkpointing?
# Guess: the same error.
# Seen (torch 2.13.0, gloo, two CPU processes): no error, and a wrong gradient. FSDP2 gathers the weights again for the
#   backward pass, and a checkpointed block runs again: both mix activations of the old weights with the new weights.
#   The gradient belongs to neither of them.
# Hurts: loops with several losses or optimizers (generator and discriminator, actor and critic, a task per batch), whose
#   order of calls is wrong by one line: a test on one GPU raises, and the large run trains on wrong gradients.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(1)
x_BK = torch.randn(4, 8)  # the same on both ranks, so that the mean over ranks is each rank's gradient


def build(kind):
    """The model and what is called for a forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    if kind == "FSDP2":
        return model, fully_shard(model, mesh=mesh, reshard_after_forward=True)
    if kind == "DDP":
        return model, DistributedDataParallel(model)
    return model, lambda x: checkpoint(model, x, use_reentrant=False) if kind == "checkpoint" else model(x)


def gradient(model):
    return torch.cat([getattr(p.grad, "full_tensor", lambda p=p: p.grad)().flatten() for p in model.parameters()])


def second_gradient(kind, late):
    """The gradient of the second loss; late: the step for the first loss comes between its forward and backward pass."""
    model, call = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=2)
    first = call(x_BK).square().mean()
    if late:
        second = (call(x_BK) - 1).square().mean()
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not late:
        second = (call(x_BK) - 1).square().mean()
    second.backward()
    return gradient(model)


model, _ = build("one process")
(model(x_BK) - 1).square().mean().backward()
old = gradient(model)
new = second_gradient("one process", late=False)
for kind in ("one process", "DDP", "FSDP2", "checkpoint"):
    try:
        found = second_gradient(kind, late=True)
    except RuntimeError as error:
        message = "RuntimeError"
        assert kind in ("one process", "DDP") and "inplace" in str(error), "the behaviour has changed"
    else:
        of_old, of_new = (((found - right).norm() / right.norm()).item() for right in (old, new))
        message = f"no error; {of_old:.0%} from the gradient of the old weights, {of_new:.0%} from that of the new ones"
        assert kind in ("FSDP2", "checkpoint") and min(of_old, of_new) > 0.05, "the behaviour has changed"
    if dist.get_rank() == 0:
        print(f"{kind}: {message}")
dist.destroy_process_group()
PY
"$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
