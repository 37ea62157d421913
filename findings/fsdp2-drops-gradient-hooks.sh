#!/bin/sh
# Question: a hook on a weight (weight.register_hook) multiplies its gradient by a mask, so that pruned or frozen entries
#   stay as they are. The model is then sharded by FSDP2 (fully_shard). Does the hook still run?
# Guess: yes, or fully_shard refuses. On one GPU and under DDP, it runs.
# Seen (torch 2.13.0, gloo, two CPU processes): no, without a message. fully_shard makes new parameters and leaves both
#   kinds of hooks behind (register_hook, register_post_accumulate_grad_hook). If hooks are registered on the new
#   parameters, register_post_accumulate_grad_hook runs, but register_hook never does: gradients reach these parameters
#   without autograd. So pruned weights get a gradient and come back with the first step.
# Hurts: masks that keep pruned weights at zero, frozen rows of an embedding, gradient noise, scaling or logging per
#   weight, optimizers that step during the backward pass: all of it stops when a script goes from DDP to FSDP2. Mask
#   parameter.grad after the backward pass, or the weight after the step.
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

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
pruned = torch.arange(16) % 2 == 0  # every second row of the weight


def add_hooks(weight, calls):
    def mask(gradient):
        calls.append("register_hook")
        return gradient * ~pruned[:, None]

    weight.register_hook(mask)
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("register_post_accumulate_grad_hook"))


def train(kind):
    """The hooks that ran, and the share of the pruned rows that are still zero after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight[pruned] = 0
    calls = []
    if kind == "FSDP2, hooks after it":
        fully_shard(model, mesh=mesh)
        add_hooks(model[0].weight, calls)
    else:
        add_hooks(model[0].weight, calls)
        if kind == "FSDP2, hooks before it":
            fully_shard(model, mesh=mesh)
    wrapped = DistributedDataParallel(model) if kind == "DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    weight = model[0].weight.detach()
    weight = weight.full_tensor() if kind.startswith("FSDP2") else weight
    return calls, (weight[pruned] == 0).all(1).double().mean().item()


for kind in ("one process", "DDP", "FSDP2, hooks before it", "FSDP2, hooks after it"):
    calls, kept = train(kind)
    if dist.get_rank() == 0:
        print(f"{kind}: {', '.join(calls) or 'no hook'} ran; {kept:.0%} of the pruned rows are still zero")
    if kind.startswith("FSDP2"):
        assert "register_hook" not in calls and kept == 0, "the behaviour has changed"
    else:
        assert len(calls) == 2 and kept == 1
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
