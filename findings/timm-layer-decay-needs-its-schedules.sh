#!/bin/sh
# Question: timm's create_optimizer_v2(model, lr=1e-3, layer_decay=0.5) gives layers that are nearer to the input smaller
#   learning rates. The optimizer is used without a schedule, or with one of torch or transformers. What are the rates?
# Guess: each layer's own, half of those of the layer above it. A schedule multiplies each group's rate, as torch's do.
# Seen (timm 1.0.31, torch 2.14.1): all layers have the same rate, 1e-3. Every group only has an entry "lr_scale" beside
#   its "lr", and no optimizer reads it. timm's own schedules multiply by it, from the first step() or their creation on;
#   those of torch, and of all that is made of them, do not. The first layer, which should have 1/16 of the rate, is
#   trained at the full one, without a message. The documentation of layer_decay does not say so.
# Hurts: pretrained models that are trained on with layer-wise decay in Lightning, accelerate, transformers or an own loop:
#   the decay that was set, and that is reported, is not there. Set group["lr"] *= group["lr_scale"] before the schedule
#   is made.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile timm==1.0.31 torch==2.14.1 torchvision==0.29.1 numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import importlib.metadata

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

print("timm", importlib.metadata.version("timm"), "torch", torch.__version__)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 32, bias=False)

    def group_matcher(self, coarse=False):
        return {"stem": "embedding", "blocks": r"^layers\.(\d+)"}


def make():
    """A model and its optimizer; all gradients are one, so that SGD moves each weight by its learning rate."""
    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, create_optimizer_v2(model, opt="momentum", lr=1e-3, momentum=0, weight_decay=0, layer_decay=0.5)


def moves(model, optimizer):
    """How far one step moves the weights of each layer, from the embedding to the head."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    return [round((old - new).mean().item(), 7) for old, new in zip(before, model.parameters())]


seen = {}
for name in ("no schedule", "torch", "timm"):
    model, optimizer = make()
    if name == "torch":
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    elif name == "timm":
        CosineLRScheduler(optimizer, t_initial=100).step(0)
    seen[name] = moves(model, optimizer)
    print(f"{name}: a step moves the layers by {seen[name]}, lr_scale {[g['lr_scale'] for g in optimizer.param_groups]}")
assert max(seen["timm"]) > 4 * min(seen["timm"])
assert all(abs(move - 1e-3) < 1e-6 for move in seen["no schedule"] + seen["torch"]), "the behaviour has changed"
PY
