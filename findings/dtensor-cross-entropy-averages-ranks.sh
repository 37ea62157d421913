#!/bin/sh
# Question: logits and targets are DTensors, sharded over two ranks by tokens, and some targets are ignored (-100). Is
#   F.cross_entropy(...).full_tensor() the loss of all tokens?
# Guess: yes: the sum over all tokens, divided by their number.
# Seen (torch 2.13.0, gloo, two CPU processes): no. It is the average of the ranks' averages. With one token on rank 0
#   and three on rank 1, the token of rank 0 counts three times as much as each of the others. The gradient is right: it
#   weighs all tokens equally, so it is not that of the value. Sums of norms are wrong in a similar way:
#   weight.norm(dim=0).sum() of a sharded weight is too small, also after full_tensor().
# Hurts: losses under tensor or sequence parallelism with padding or masked prompts: validation losses and perplexities
#   depend on how tokens lie on ranks. And group-lasso terms of FSDP2's weights, whose values come out too small.
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


def over_ranks(tensor):
    return distribute_tensor(tensor, mesh, [Shard(0)])


torch.manual_seed(0)
logits = torch.randn(6, 10)
targets = torch.tensor([1, -100, -100, 2, 3, 4])  # rank 0 has one token, rank 1 three
whole = logits.clone().requires_grad_()
loss = F.cross_entropy(whole, targets)
loss.backward()
sharded = over_ranks(logits.clone()).requires_grad_()
sharded_loss = F.cross_entropy(sharded, over_ranks(targets))
sharded_loss.backward()
value, gradient = sharded_loss.full_tensor(), sharded.grad.full_tensor()
of_ranks = (F.cross_entropy(logits[:3], targets[:3]) + F.cross_entropy(logits[3:], targets[3:])) / 2

weight = torch.randn(4, 6)
norms = weight.norm(dim=0).sum()
sharded_norms = over_ranks(weight).norm(dim=0).sum().full_tensor()
of_columns = over_ranks(weight).norm(dim=0).full_tensor().sum()
if dist.get_rank() == 0:
    print(f"cross-entropy: {value:.4f}; of all tokens {loss:.4f}, average of the ranks' averages {of_ranks:.4f}")
    print(f"sum of column norms: {sharded_norms:.4f}; of the whole weight {norms:.4f}")
assert torch.allclose(gradient, whole.grad) and torch.allclose(of_columns, norms)
assert torch.allclose(value, of_ranks) and not torch.allclose(value, loss, rtol=0.01), "the behaviour has changed"
assert sharded_norms < 0.99 * norms, "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
