#!/bin/sh
# Question: rows are sampled by weight with torch.multinomial(weights, n, replacement=True). There are 8 million rows,
#   sorted by weight, with weights 1, 1/2, 1/3 and so on, in fp32. Can every row be drawn?
# Guess: yes, and by its weight, up to the rounding of fp32.
# Seen (torch 2.13.0, CPU): no row beyond 2^21 = 2.1 million is ever drawn, three quarters of all, and the rows beyond
#   the first million get 6.8% of the draws instead of 12.6%. The weights are summed in fp32, one after the other, and
#   the sum no longer grows where a weight is less than half the distance to the next number.
#   torch.distributions.Categorical does the same. Weights in fp64 are right, and so is torch's WeightedRandomSampler,
#   which makes them fp64. Vocabularies of 50,000 tokens are too small to show it.
# Hurts: sampling of documents, negatives or n-grams by frequency, length or quality: rare ones are never seen, and if
#   the weights differ by more, a few large ones at the front are enough.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import torch

torch.manual_seed(0)
ROWS, DRAWS = 8_000_000, 4_000_000
weights = 1 / torch.arange(1, ROWS + 1, dtype=torch.float64)
tail = (weights[1_000_000:].sum() / weights.sum()).item()
print(f"{ROWS:,} rows; the share of those beyond the first million should be {tail:.1%}")
seen = {}
for name, draws in {
    "fp32": lambda: torch.multinomial(weights.float(), DRAWS, replacement=True),
    "fp64": lambda: torch.multinomial(weights, DRAWS, replacement=True),
    "fp32, Categorical": lambda: torch.distributions.Categorical(probs=weights.float()).sample((DRAWS,)),
    "fp32, WeightedRandomSampler": lambda: torch.tensor(
        list(torch.utils.data.WeightedRandomSampler(weights.float(), DRAWS))
    ),
}.items():
    rows = draws()
    seen[name] = (rows >= 1_000_000).double().mean().item(), rows.max().item()
    print(f"{name}: {seen[name][0]:.1%}; the last row drawn is {seen[name][1]:,}")
# A thousand heavy rows before 8 million light ones, which have 5% of the weight.
mixed = torch.cat([torch.full((1000,), 1000.0), torch.full((ROWS,), 1e6 * 0.05 / 0.95 / ROWS)])
light = (torch.multinomial(mixed, DRAWS, replacement=True) >= 1000).double().mean().item()
print(f"light rows behind a thousand heavy ones: {light:.1%} of the draws, 5.0% of the weight")
for name in ("fp64", "fp32, WeightedRandomSampler"):
    assert abs(seen[name][0] - tail) < 0.002 and seen[name][1] > 7_900_000
for name in ("fp32", "fp32, Categorical"):
    assert seen[name][0] < 0.08 and seen[name][1] < 2**21, "the behaviour has changed"
assert light == 0, "the behaviour has changed"
PY
