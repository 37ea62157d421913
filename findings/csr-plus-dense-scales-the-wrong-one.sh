#!/bin/sh
# Question: torch.add(csr, dense, alpha=3), where the first matrix is sparse in the CSR layout. What is the result?
# Guess: csr + 3 * dense, by the definition of torch.add; or it is refused, as for COO.
# Seen (torch 2.13.0, CPU): 3 * csr + dense, without a message. CSC does the same. torch.add(dense, csr, alpha=3), csr +
#   csr and dense.add_(csr, alpha=3) are right. COO refuses a sparse first argument.
# Hurts: updates and differences that are written as one call: torch.add(sparse_weight, delta, alpha=-lr) returns -lr
#   times the weight plus the delta, and torch.add(csr, dense, alpha=-1) the difference with the wrong sign.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import warnings

import torch

warnings.filterwarnings("ignore", message="Sparse CS. tensor support")
first = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
second = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
right, wrong = first + 3 * second, 3 * first + second
for name, sparse in (("CSR", first.to_sparse_csr()), ("CSC", first.to_sparse_csc())):
    seen = torch.add(sparse, second, alpha=3)
    print(f"{name}: torch.add(sparse, dense, alpha=3) = {seen.tolist()}; sparse + 3 dense = {right.tolist()}")
    assert torch.equal(torch.add(second, sparse, alpha=3), second + 3 * first)
    assert torch.equal(sparse + second, first + second)
    assert torch.equal(torch.add(sparse, sparse, alpha=3).to_dense(), 4 * first)
    assert torch.equal(seen, wrong), "the behaviour has changed"
PY
