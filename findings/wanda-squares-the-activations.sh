#!/bin/sh
# Question: torchao's WandaSparsifier prunes half of a linear layer's weights, "based on the product of the input
#   activation norm and the weight magnitude", after the Wanda paper. Which weights are left?
# Guess: in each row, those with the largest products of |weight| and the norm of the input feature over all calibration
#   batches.
# Seen (torchao 0.18.0, torch 2.13.0): those with the largest products of |weight| and the square of that norm: the
#   observer sums squares, and no root is taken. Weights are compared over the whole layer, as a comment in its code
#   says, not in each row as in the paper. Below, 10% of the weights are chosen differently, and the error of the
#   layer's output is 13% larger than with the norm. The activations count too much, and the weights too little.
# Hurts: pruning with torchao, and comparisons with Wanda that use it: the pruned model is worse than the method.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 torchao==0.18.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch
from torchao.sparsity import WandaSparsifier

torch.manual_seed(0)
weight = torch.randn(128, 256)
scales = torch.exp(torch.randn(256) / 2)  # of the input features
batches = [torch.randn(64, 256) * scales for _ in range(4)]
inputs = torch.cat(batches)


def expected(power, rows):
    """The weights that are left, by |weight| * norm ** power, in each row or in the whole layer."""
    metric = weight.abs() * inputs.norm(dim=0) ** power
    metric = metric if rows else metric.view(1, -1)
    left = torch.zeros_like(metric).scatter_(1, metric.topk(metric.shape[1] // 2, dim=1).indices, 1.0)
    return left.view_as(weight)


def error(left):
    return ((weight * (1 - left)) @ inputs.T).norm().item() / (weight @ inputs.T).norm().item()


model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
with torch.no_grad():
    model[0].weight.copy_(weight)
sparsifier = WandaSparsifier(sparsity_level=0.5)
sparsifier.prepare(model, None)
for batch in batches:
    model(batch)
sparsifier.step()
sparsifier.squash_mask()
left = (model[0].weight != 0).float()
same = {}
metrics = (("norm, in each row", 1, True), ("norm, whole layer", 1, False), ("squared norm, whole layer", 2, False))
for name, power, rows in metrics:
    reference = expected(power, rows)
    same[name] = (reference == left).float().mean().item()
    print(f"{name}: {same[name]:.1%} of the choices are torchao's; error of the output {error(reference):.4f}")
print(f"torchao: error of the output {error(left):.4f}")
assert same["norm, in each row"] < 0.92 and same["norm, whole layer"] < 0.92, "the behaviour has changed"
assert same["squared norm, whole layer"] > 0.999, "the behaviour has changed"
assert error(left) > 1.1 * error(expected(1, True)), "the behaviour has changed"
PY
