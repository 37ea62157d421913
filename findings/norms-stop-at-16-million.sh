#!/bin/sh
# Question: what are torch.linalg.vector_norm(x, 1) and (x, 0) of 40 million ones in fp32 on the CPU? And the 2-norm of a
#   gradient of 268 million numbers, as of an embedding of 131,072 tokens by 2,048?
# Guess: 40 million, 40 million, and right to 1%. x.sum() of as many ones is right, since it is summed in parts.
# Seen (torch 2.13.0, one CPU thread): 16,777,216 = 2^24, twice: the norms add to one fp32 number, to which 1 adds nothing
#   from there on. The 2-norm adds in more parts, and is too small by 0.3% for 40 million normal numbers and by 4% for 268
#   million, so clip_grad_norm_ clips too little. With two threads, each counts as far. In fp16 the first two are
#   infinite. x.abs().sum(), (x != 0).sum() and vector_norm(x, 2, dtype=torch.float64) are right.
# Hurts: L1 penalties, counts of non-zeros by a 0-norm, and norms of large gradients and weights on the CPU, as with
#   parameters that are offloaded, or in the analysis of checkpoints. The value depends on the number of threads.
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

torch.set_num_threads(1)
ones = torch.ones(40_000_000)
seen = {
    "vector_norm(x, 1)": torch.linalg.vector_norm(ones, 1).item(),
    "vector_norm(x, 0)": torch.linalg.vector_norm(ones, 0).item(),
    "x.abs().sum()": ones.abs().sum().item(),
    "(x != 0).sum()": (ones != 0).sum().item(),
}
for name, value in seen.items():
    print(f"40,000,000 ones, {name}: {value:,.0f}")
generator = torch.Generator().manual_seed(0)
gradient = torch.empty(131_072, 2_048)
ratios = {}
for rows in (19_531, 131_072):
    part = gradient[:rows].normal_(generator=generator)
    true = sum(float(each.double().square().sum()) for each in part.split(4096)) ** 0.5
    ratios[rows] = torch.linalg.vector_norm(part).item() / true
    print(f"{part.numel():,} normal numbers: the 2-norm is {ratios[rows]:.4f} of what it should be")
weight = torch.nn.Parameter(torch.empty(0))
weight.data, weight.grad = gradient, gradient  # the same memory
torch.nn.utils.clip_grad_norm_([weight], 1.0)
clipped = sum(float(each.double().square().sum()) for each in gradient.split(4096)) ** 0.5
print(f"after clip_grad_norm_ to 1, the norm of the larger is {clipped:.2f}")
assert seen["x.abs().sum()"] == seen["(x != 0).sum()"] == 40_000_000
assert seen["vector_norm(x, 1)"] == seen["vector_norm(x, 0)"] == 2**24, "the behaviour has changed"
assert ratios[19_531] > 0.99 and ratios[131_072] < 0.98 and clipped > 1.02, "the behaviour has changed"
PY
