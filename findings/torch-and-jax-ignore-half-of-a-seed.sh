#!/bin/sh
# Question: a seed has 64 bits, and a run gives its ranks seeds of their own: seed + (rank << 32). Do the ranks draw
#   different numbers, by torch.manual_seed on the CPU, or by jax.random.key?
# Guess: yes. The documentation of torch.manual_seed says that seeds from -2^63 to 2^64 - 1 are valid.
# Seen (torch 2.13.0, JAX 0.10.2): no. torch's generator for the CPU and JAX without jax_enable_x64 use the lower 32 bits
#   of a seed and drop the others, without a warning; torch.initial_seed() still says the whole seed. So 1, 2^32 + 1 and
#   7 * 2^32 + 1 draw the same numbers. numpy's default_rng and Python's random use all bits.
# Hurts: ranks, workers or repetitions of an experiment whose seeds are packed into 64 bits: all draw the same weights,
#   noise and orders of rows, so a run sees one shard's randomness on all ranks, and repetitions have no spread.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 jax==0.10.2 numpy==2.4.6
fi
JAX_PLATFORMS=cpu "$PYTHON" -W error - <<'PY'
import random

import jax
import numpy as np
import torch

SEEDS = [1 + (rank << 32) for rank in range(4)]


def with_torch(seed):
    torch.manual_seed(seed)
    assert torch.initial_seed() == seed
    return torch.rand(4).tolist()


functions = {
    "torch.manual_seed": with_torch,
    "torch.Generator": lambda seed: torch.randperm(1000, generator=torch.Generator().manual_seed(seed)).tolist(),
    "jax.random.key": lambda seed: jax.random.normal(jax.random.key(seed), (4,)).tolist(),
    "numpy": lambda seed: np.random.default_rng(seed).random(4).tolist(),
    "random": lambda seed: random.Random(seed).random(),
}
seen = {}
for name, function in functions.items():
    seen[name] = len({str(function(seed)) for seed in SEEDS})
    print(f"{name}: {len(SEEDS)} ranks draw {seen[name]} different sequences")
assert seen["numpy"] == seen["random"] == 4
assert all(seen[name] == 1 for name in list(functions)[:3]), "the behaviour has changed"
PY
