#!/bin/sh
# Question: sparse training by soft thresholds, F.softshrink(weight, lr * l1) after each step, is compiled by torch.compile.
#   What becomes of a NaN among the weights?
# Guess: NaN, as without torch.compile.
# Seen (torch 2.13.0, CPU): 0. Without torch.compile it stays NaN. hardshrink, threshold, relu, elu, leaky_relu, silu and
#   softplus keep NaN both ways.
# Hurts: runs whose weights become NaN, by a spike or an overflow: the weights are set to 0 and the loss stays finite, so no
#   check for NaN stops the run, and the lost neurons look as if they had been pruned. Activations by F.softshrink (sparse
#   coding) hide NaN likewise.
# Packages: torch is a large download, and torch.compile needs a C++ compiler. To use an existing Python, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
TORCHINDUCTOR_CACHE_DIR="$dir/cache" "$PYTHON" -W ignore - <<'PY'
import torch
import torch.nn.functional as F

values = torch.tensor([torch.nan, 2.0, 0.2, -2.0]).repeat(16)
for name, lambd in (("softshrink", 0.5), ("hardshrink", 0.5), ("leaky_relu", 0.01)):
    shrink = getattr(F, name)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: shrink(x, lambd))(values)[:4]
    eager = shrink(values, lambd)[:4]
    print(f"{name}: eager {eager.tolist()}, compiled {compiled.tolist()}")
    assert torch.equal(eager[1:], compiled[1:]) and eager[0].isnan()
    assert compiled[0].isnan() == (name != "softshrink"), "the behaviour has changed"
    if name == "softshrink":
        assert compiled[0] == 0, "the behaviour has changed"
PY
