#!/bin/sh
# Question: half of a weight is pruned by a mask of zeros and ones, weight * mask, and stored by pydata/sparse,
#   sparse.COO.from_numpy. What are its nnz and density?
# Guess: half, as numpy.count_nonzero and scipy.sparse say.
# Seen (sparse 0.19.3, scipy 1.17.1): three quarters. A negative weight times 0 is -0.0, and the library compares the bits
#   with those of its fill value, 0.0; so each pruned negative weight is stored. GCXS, the compressed format, does the same,
#   sparse.nonzero lists them, and products keep them. Weights made by np.where(mask, weight, 0) are stored rightly, and so
#   is weight * mask + 0, since -0.0 + 0 is 0.0.
# Hurts: half as much memory and time again for every pruned matrix, and a sparsity of 25% where 50% was asked for; more so
#   at high sparsity: at 95% pruned, half of the zeros are stored, and the matrix is 10 times as large.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile sparse==0.19.3 scipy==1.17.1 numpy==2.4.6 numba==0.68.1
fi
"$PYTHON" - <<'PY'
import numpy as np
import scipy.sparse
import sparse

rng = np.random.default_rng(0)
weight = rng.standard_normal((512, 512)).astype(np.float32)
for pruned in (0.5, 0.95):
    mask = np.abs(weight) >= np.quantile(np.abs(weight), pruned)
    by_product, by_where = weight * mask, np.where(mask, weight, 0)
    assert np.array_equal(by_product, by_where)
    right = np.count_nonzero(by_product) / weight.size
    coo = sparse.COO.from_numpy(by_product)
    seen = {
        "COO": coo.density,
        "GCXS": sparse.GCXS.from_numpy(by_product).density,
        "COO times 2": (coo * 2).density,
        "sparse.nonzero": len(sparse.nonzero(coo)[0]) / weight.size,
    }
    others = {
        "scipy": scipy.sparse.csr_array(by_product).nnz / weight.size,
        "COO of np.where": sparse.COO.from_numpy(by_where).density,
        "COO of weight * mask + 0": sparse.COO.from_numpy(by_product + 0).density,
    }
    print(f"pruned {pruned:.0%}:", {name: round(value, 3) for name, value in (seen | others).items()})
    assert all(value == right for value in others.values())
    assert all(abs(value - (right + pruned / 2)) < 0.01 for value in seen.values()), "the behaviour has changed"
    assert np.array_equal(coo.todense(), by_where)
PY
