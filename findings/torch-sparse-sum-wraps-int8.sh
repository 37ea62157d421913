#!/bin/sh
# Question: a sparse (COO) matrix of tokens by neurons, int8, holds 1 where a neuron is active. torch.sparse.sum(active, 0)
#   counts the tokens for which each neuron is active. What does it return for 300, and what for a mask of booleans?
# Guess: 300. torch.sum, Tensor.sum(0) and torch.sparse.sum of all dimensions sum integers and booleans in int64.
# Seen (torch 2.13.0, CPU): 44, of type int8, and True, of type bool. With dim, torch.sparse.sum keeps the type of its
#   input, and sums wrap; those of uint8 too. active.sum(0) and torch.sparse.sum(…, dtype=torch.int64) are right.
# Hurts: activity of neurons, loads of experts and document frequencies that are kept as sparse masks: a neuron that was
#   active for 256 tokens counts as dead, and by a mask of booleans, every neuron was active for at most one token.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch

active = torch.zeros(1_000, 3, dtype=torch.bool)
active[:300, 0] = True
active[100:356, 1] = True
active[5, 2] = True
right = active.sum(0).tolist()
assert right == [300, 256, 1]
seen = {}
for dtype in (torch.bool, torch.int8, torch.uint8):
    coo = active.to(dtype).to_sparse()
    seen[dtype] = torch.sparse.sum(coo, dim=0).to_dense()
    print(f"{dtype}: {seen[dtype].tolist()} of type {seen[dtype].dtype}; Tensor.sum(0): {coo.sum(0).to_dense().tolist()}")
    assert coo.sum(0).to_dense().tolist() == right and torch.sparse.sum(coo).item() == sum(right)
    assert torch.sparse.sum(coo, dim=0, dtype=torch.int64).to_dense().tolist() == right
assert seen[torch.bool].tolist() == [True, True, True], "the behaviour has changed"
assert seen[torch.int8].tolist() == seen[torch.uint8].tolist() == [44, 0, 1], "the behaviour has changed"
PY
