#!/bin/sh
# Question: the weights of 32 experts are one parameter of shape (32, 128, 64), for grouped products, as in transformers
#   5. It is trained by the Muon of pytorch_optimizer or heavyball. Does each expert get the update that it would get
#   alone?
# Guess: yes, the products of Muon's iteration are batched, or an error says that only matrices are supported, as
#   torch.optim.Muon does.
# Seen (pytorch_optimizer 4.1.0, heavyball 3.2.1, torch 2.13.0): no. The parameter is flattened to (32, 8192), as for
#   convolutions, and that matrix is orthogonalised: the experts are made orthogonal to each other, and their own matrices
#   are left nearly as the gradient has them. An update of one expert is 10 to 11 times smaller than alone, and its
#   singular values, which Muon makes equal, differ by a factor of 5. It gets smaller with the number of experts. NorMuon
#   and AdaGO of pytorch_optimizer do the same, and so does AdaMuon, which scales its updates up again. There is no
#   message. The author's package, muon-optimizer 0.1.0, is right.
# Hurts: mixtures of experts trained with these: their experts learn at a tenth of the rate, without what Muon is for, and
#   the result depends on whether the experts are stored as one parameter. Give it a matrix per expert, or a batched Muon.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 pytorch-optimizer==4.1.0 heavyball==3.2.1 \
    muon-optimizer==0.1.0
fi
TORCHDYNAMO_DISABLE=1 "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import heavyball
import muon
import pytorch_optimizer
import torch

EXPERTS, ROWS, COLUMNS = 32, 128, 64
torch.manual_seed(0)
gradient = torch.randn(EXPERTS, ROWS, COLUMNS)


def of_package(name):
    return lambda weight: getattr(pytorch_optimizer, name)([{"params": [weight], "use_muon": True}], lr=1.0)


ways = {f"pytorch_optimizer.{name}": of_package(name) for name in ("Muon", "NorMuon", "AdaGO", "AdaMuon")}
ways["heavyball.Muon"] = lambda weight: heavyball.Muon([weight], lr=1.0)
ways["muon.SingleDeviceMuon"] = lambda weight: muon.SingleDeviceMuon([weight], lr=1.0)


def update(make, gradient):
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = make(weight)
    weight.grad = gradient.clone()
    optimizer.step()
    return weight.detach()


for name, make in ways.items():
    alone, stacked = update(make, gradient[0]), update(make, gradient)
    size = (stacked[0].norm() / alone.norm()).item()
    spread = [torch.linalg.cond(matrix).item() for matrix in (alone, stacked[0], stacked.flatten(1))]
    print(f"{name}: size of an expert's update in the stack / alone {size:.3f}; largest singular value / smallest: alone "
          f"{spread[0]:.1f}, in the stack {spread[1]:.1f}, all experts as one matrix {spread[2]:.1f}")
    if name.startswith("muon."):
        assert torch.allclose(alone, stacked[0], atol=0.02)
        continue
    assert spread[1] > 1.2 * spread[0] and spread[2] < 1.3, "the behaviour has changed"
    assert size < 0.2 or name.endswith("AdaMuon"), "the behaviour has changed"
try:
    torch.optim.Muon([torch.nn.Parameter(torch.zeros_like(gradient))])
    raise SystemExit("torch.optim.Muon took the stack")
except ValueError as error:
    print(f"torch.optim.Muon: {error}")
PY
