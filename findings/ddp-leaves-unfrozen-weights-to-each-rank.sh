#!/bin/sh
# Question: a layer is frozen for the first steps (requires_grad_(False)), as when a head or an adapter is trained first.
#   The model is wrapped in DDP, and the layer is unfrozen later. Is its gradient averaged over the ranks?
# Guess: yes, or DDP raises: the layer was part of the model when it was wrapped.
# Seen (torch 2.13.0, gloo, two CPU processes): no, without a message. DDP averages the parameters that required gradients
#   when it was made. Each rank trains the unfrozen layer on its own data only, and the copies drift apart; those of the
#   other layers stay equal. find_unused_parameters and static_graph do not change that. Wrapped again after unfreezing, or
#   under FSDP2, the layer is averaged. DDP's documentation warns against changing the parameters, not the flag.
# Hurts: gradual unfreezing, and callbacks that unfreeze a backbone after a warm-up: the layer has a smaller batch,
#   each rank has another model, and rank 0's is saved, whose other layers were trained for the mixture.
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
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
torch.manual_seed(1)
inputs = torch.randn(60, 2, 8, 8)  # step, rank, row, feature
OPTIONS = {"DDP": {}, "DDP, unused": {"find_unused_parameters": True}, "DDP, static": {"static_graph": True}}


def train(kind):
    """The relative distance between the ranks' copies of the layer that is unfrozen after ten steps, and of the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    sharded = kind == "FSDP2"
    wrapped = fully_shard(model, mesh=mesh) if sharded else DistributedDataParallel(model, **OPTIONS.get(kind, {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, batch in enumerate(inputs):
        if step == 10:
            model[0].requires_grad_(True)
            wrapped = DistributedDataParallel(model) if kind == "DDP, wrapped again" else wrapped
        (wrapped(batch[rank]) - batch[rank, :, :4]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    apart = []
    for layer in (model[0], model[2]):
        weight = (layer.weight.full_tensor() if sharded else layer.weight).detach().clone()
        copies = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(copies, weight)
        apart.append(((copies[0] - copies[1]).norm() / copies[0].norm()).item())
    return apart


for kind in (*OPTIONS, "DDP, wrapped again", "FSDP2"):
    unfrozen, other = train(kind)
    if rank == 0:
        print(f"{kind}: the ranks' copies of the unfrozen layer are {unfrozen:.1%} apart, of the other layer {other:.1%}")
    assert other == 0 and ((unfrozen > 0.02) if kind in OPTIONS else unfrozen == 0), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
