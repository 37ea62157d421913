#!/bin/sh
# Question: to save memory, each weight is updated as soon as its gradient is there: an optimizer per weight steps in
#   register_post_accumulate_grad_hook, as PyTorch's tutorial on this shows. The model is wrapped in DDP. Which gradient
#   do the steps use?
# Guess: the mean over ranks, because the hook runs after the gradient is complete. The ranks' weights stay equal.
# Seen (torch 2.13.0, gloo, two CPU processes): the rank's own gradient. DDP averages after these hooks (and after
#   register_hook). Each rank trains alone on its share of the data, and the weights of the ranks drift apart, with no
#   message. Under FSDP2, the same hook, registered after fully_shard, sees the mean.
# Hurts: optimizers in the backward pass, and hooks that clip gradients or record their norms: under DDP they train as
#   many different models as there are ranks, of which rank 0's is saved. Losses look normal: each model does learn.
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
inputs = torch.randn(20, 2, 4, 8)  # step, rank, row, feature


def step_in_backward(model):
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def train(kind, in_backward):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    wrapped = DistributedDataParallel(model) if kind == "DDP" else fully_shard(model, mesh=mesh)
    if in_backward:
        step_in_backward(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in inputs:
        (wrapped(batch[rank]) - batch[rank, :, :4]).pow(2).sum().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()])
    of_ranks = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(of_ranks, weights)
    return of_ranks


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


for kind in ("DDP", "FSDP2"):
    expected, found = train(kind, in_backward=False), train(kind, in_backward=True)
    apart, wrong = distance(found[1], found[0]), distance(found[0], expected[0])
    if rank == 0:
        print(f"{kind}: steps in the backward pass: the ranks' weights are {apart:.0%} apart, and rank 0's are {wrong:.0%} "
              "from those of steps after it")
    assert distance(expected[1], expected[0]) == 0
    assert (apart > 0.05 and wrong > 0.05) if kind == "DDP" else (apart == 0 and wrong < 1e-5), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
