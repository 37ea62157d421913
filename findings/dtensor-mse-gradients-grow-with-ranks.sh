#!/bin/sh
# Question: predictions and targets are DTensors, sharded over two ranks by rows. Does F.mse_loss have the gradient that
#   it has on one rank?
# Guess: yes, and the same value.
# Seen (torch 2.13.0, gloo, two CPU processes): the gradient is twice as large. Its backward pass divides by the number
#   of elements of the rank's own shard, not of the whole tensor. huber_loss, smooth_l1_loss, soft_margin_loss and
#   binary_cross_entropy do the same. If shards differ in size, the value is wrong too. (x - y).square().mean() and
#   l1_loss are right.
# Hurts: distillation of hidden states, value heads and autoencoders under tensor or sequence parallelism. The weight of
#   this loss against the others grows with the number of ranks, without a message.
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
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
losses = {
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "l1_loss": F.l1_loss,
    "square().mean()": lambda x, y: (x - y).square().mean(),
}
ratios = {}
for rows in (4, 5):
    x, y = torch.randn(2, rows, 3)
    for name, loss_of in losses.items():
        whole = x.clone().requires_grad_()
        loss = loss_of(whole, y)
        loss.backward()
        sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        sharded_loss = loss_of(sharded, distribute_tensor(y, mesh, [Shard(0)]))
        sharded_loss.backward()
        value = (sharded_loss.full_tensor() / loss).item()
        gradient = (sharded.grad.full_tensor() / whole.grad)[:, 0].tolist()
        ratios[rows, name] = value, min(gradient), max(gradient)
        if dist.get_rank() == 0:
            print(f"{rows} rows, {name}: {value:.3f} times the value, "
                  f"{gradient[0]:.2f} to {gradient[-1]:.2f} times the gradient")


def equal(ratio, expected):
    return all(abs(a - b) < 1e-4 for a, b in zip(ratio, expected, strict=True))


for rows in (4, 5):
    assert all(equal(ratios[rows, name], (1, 1, 1)) for name in ("l1_loss", "square().mean()"))
for name in ("mse_loss", "huber_loss"):
    assert equal(ratios[4, name], (1, 2, 2)), "the behaviour has changed"
    assert abs(ratios[5, name][0] - 1) > 1e-3, "the behaviour has changed"
    assert equal(ratios[5, name][1:], (5 / 3, 5 / 2)), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
