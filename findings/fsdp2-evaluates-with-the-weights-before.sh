#!/bin/sh
# Question: a model is sharded by FSDP2 with its defaults: fully_shard on each block, then on the whole. For an evaluation,
#   averaged weights are swapped in, in place and through the optimizer's parameters (EMA, schedule-free optimizers), and
#   the trained weights are swapped back afterwards. Which weights do the next forward passes use?
# Guess: those that the parameters hold.
# Seen (torch 2.13.0, gloo, two CPU processes): a mixture. With the defaults, the root keeps what it gathered in a forward
#   pass until a backward pass frees it. Without one, embeddings, final norm and head stay those of the pass before, while
#   the blocks' weights are the new ones. If the trained weights were evaluated first, the average's evaluation is wrong;
#   if only the average was, the next training step has a wrong loss and gradient. There is no message. model.reshard()
#   frees the old copy.
# Hurts: evaluations of averages, merges or schedule-free weights, and one training step after each of them. Call
#   model.reshard() after each evaluation.
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

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
tokens = torch.arange(20)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def build(sharded):
    torch.manual_seed(0)
    model = Model()
    for module in (*model.blocks, model) if sharded else ():
        fully_shard(module, mesh=mesh)
    return model


@torch.no_grad()
def scale(optimizer, factor):  # stands for a swap: the average is half of the weights
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.mul_(factor)


def evaluate(model, reshard):
    with torch.no_grad():
        logits = model(tokens)
    if reshard:
        model.reshard()
    return logits


def run(sharded, reshard=False):
    """The logits of the average where both are evaluated; the gradient after an evaluation of the average alone."""
    model = build(sharded)
    optimizer = torch.optim.SGD(model.parameters())
    evaluate(model, reshard)
    scale(optimizer, 0.5)
    average = evaluate(model, reshard)

    model = build(sharded)
    optimizer = torch.optim.SGD(model.parameters())
    scale(optimizer, 0.5)
    evaluate(model, reshard)
    scale(optimizer, 2)
    model(tokens).logsumexp(-1).sum().backward()
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().flatten() for p in model.parameters()]
    return average, torch.cat(grads)


for reshard in (False, True):
    pairs = list(zip(run(True, reshard), run(False)))
    logits, gradient = (((found - right).norm() / right.norm()).item() for found, right in pairs)
    if dist.get_rank() == 0:
        print(f"FSDP2, reshard()={reshard}: logits of the average after the weights' are {logits:.0%} off;",
              f"the gradient after an evaluation of the average is {gradient:.0%} off")
    assert (max(logits, gradient) < 1e-5) if reshard else min(logits, gradient) > 0.5, "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
