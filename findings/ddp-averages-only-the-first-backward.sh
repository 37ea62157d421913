#!/bin/sh
# Question: a step under DistributedDataParallel has two losses with a backward() each: of one forward pass
#   (retain_graph=True), or of two forward passes that both come before. Is the gradient the mean over the ranks?
# Guess: yes, or an error. Gradients are averaged as each backward pass computes them, and after forward, backward,
#   forward, backward, without no_sync, the sum of both is the mean over ranks.
# Seen (torch 2.13.0, gloo, two CPU processes): only the first backward() is averaged. The second adds the rank's own
#   gradient, so the ranks' gradients differ, and so do their weights from the first step on. There is neither an error nor
#   a warning, and DDP's page says nothing (an open issue since 2020: pytorch/pytorch 47260). (loss1 + loss2).backward() is
#   right, and so is alternating forward and backward.
# Hurts: auxiliary losses, regularisation, distillation and contrastive or GAN training with backward() for each loss. The
#   ranks train models of their own that drift apart, rank 0's is saved, and its gradients have the noise of one rank.
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
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, targets = torch.randn(2, ranks, 6, 16), torch.randn(2, ranks, 6, 8)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def losses(model, which):
    """Two losses of one batch, that is of one forward pass."""
    outputs = model(inputs[0, which])
    return mse_loss(outputs, targets[0, which]), outputs.square().mean()


def alternating(model):
    for batch in range(2):
        mse_loss(model(inputs[batch, rank]), targets[batch, rank]).backward()


def both_first(model):
    both = [mse_loss(model(inputs[batch, rank]), targets[batch, rank]) for batch in range(2)]
    for loss in both:
        loss.backward()


def added(model):
    sum(losses(model, rank)).backward()


def one_by_one(model):
    first, second = losses(model, rank)
    first.backward(retain_graph=True)
    second.backward()


def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def mean_over_ranks(same_batch):
    model = build()
    for which in range(ranks):
        if same_batch:
            (sum(losses(model, which)) / ranks).backward()
        else:
            for batch in range(2):
                (mse_loss(model(inputs[batch, which]), targets[batch, which]) / ranks).backward()
    return gradient(model)


CASES = {
    "forward, backward, forward, backward": (alternating, False, True),
    "forward, forward, backward, backward": (both_first, False, False),
    "forward, backward of the sum": (added, True, True),
    "forward, backward, backward": (one_by_one, True, False),
}
for name, (step, same_batch, right) in CASES.items():
    model = DistributedDataParallel(build())
    step(model)
    own, expected = gradient(model), mean_over_ranks(same_batch)
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own)
    error = ((own - expected).norm() / expected.norm()).item()
    apart = ((everyone[0] - everyone[1]).norm() / expected.norm()).item()
    if rank == 0:
        print(f"{name}: {error:.0%} from the mean over ranks, the ranks are {apart:.0%} apart")
    assert (error < 1e-5 and apart < 1e-5) if right else (error > 0.1 and apart > 0.1), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
