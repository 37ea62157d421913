#!/bin/sh
# Question: FSDP2 shards parameters over two ranks. What do `weight.norm().item()` and `if grad.isnan().any():` see?
# Guess: the whole tensor; both ranks see the same. DTensors compute as if they were not sharded.
# Seen (torch 2.13.0, gloo, two CPU processes): each rank sees its own shard. A sum, norm, maximum or any() over shards
#   is a partial result that is only reduced when a further operation needs it, and .item(), bool() and float() do not.
#   Below, the norm is 1.00 on one rank and 2.00 on the other instead of 2.24, and `if grad.isnan().any()` is true on
#   one rank only. .full_tensor().item() is right, and so is the norm that clip_grad_norm_ returns.
# Hurts: norms, counts of zeros and checks for NaN under FSDP2. Logged values are too small, without a message; and
#   where a check decides whether to skip a step, ranks go different ways.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
layer = torch.nn.Linear(2, 2, bias=False)
torch.nn.init.zeros_(layer.weight)
with torch.no_grad():
    layer.weight[0, 0], layer.weight[1, 0] = 1, 2  # one row for each rank
whole = layer.weight.detach().clone()
fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
layer(torch.ones(1, 2)).sum().backward()
clipped = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
if rank == 1:
    layer.weight.grad.to_local()[0, 0] = torch.nan
weight, grad = layer.weight.detach(), layer.weight.grad
mine = {
    "norm": weight.norm().item(),
    "maximum": weight.max().item(),
    "non-zeros": (weight != 0).sum().item(),
    "NaN": bool(grad.isnan().any()),
    "norm, full_tensor": weight.norm().full_tensor().item(),
    "NaN, full_tensor": bool(grad.isnan().any().full_tensor()),
    "clip_grad_norm_": clipped.item(),
}
ranks = [None, None]
dist.all_gather_object(ranks, mine)
if rank == 0:
    for name in mine:
        print(f"{name}: {ranks[0][name]:.4g} on rank 0, {ranks[1][name]:.4g} on rank 1")
    norm = whole.norm().item()
    assert all(abs(each["norm, full_tensor"] - norm) < 1e-5 and each["NaN, full_tensor"] for each in ranks)
    assert all(each["clip_grad_norm_"] == 2 for each in ranks)
    seen = [(each["norm"], each["maximum"], each["non-zeros"], each["NaN"]) for each in ranks]
    assert seen == [(1, 1, 1, False), (2, 2, 1, True)], "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
