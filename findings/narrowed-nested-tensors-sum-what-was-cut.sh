#!/bin/sh
# Question: torch.nested.narrow(batch, 1, starts, lengths, layout=torch.jagged) cuts a padded batch to its real tokens,
#   without a copy. What do sum(), mean() and max() of the result count?
# Guess: the real tokens, as for any nested tensor; what was cut away is not part of it.
# Seen (torch 2.13.0): the padding too. sum, mean and max over everything, of x and of what is computed from it, read all
#   of the memory below, with the parts that were cut away. In the backward pass of mean(), each token of the padding gets
#   as much as a real one. unbind() gives the real tokens only, and a sum over the tokens of each row (dim=1) raises.
#   contiguous() copies the real tokens, and then all are right.
# Hurts: losses per token that are averaged by x.mean(), and statistics of activations: padding counts, as if it had
#   never been cut, but only in these functions.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import torch

torch.manual_seed(0)
starts, lengths = torch.tensor([0, 2, 1]), torch.tensor([3, 1, 5])
losses_BT = torch.full((3, 8), 100.0)  # of padding
for row, (start, length) in enumerate(zip(starts, lengths)):
    losses_BT[row, start : start + length] = torch.rand(int(length))
losses_BT.requires_grad_()
FUNCTIONS = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "share above 0.5": lambda x: (x > 0.5).float().mean(),
    "number of values": lambda x: torch.ones_like(x).sum(),
}


def narrow(losses):
    return torch.nested.narrow(losses[..., None], 1, starts, lengths, layout=torch.jagged)


nested = narrow(losses_BT)
tokens = torch.cat([row.detach() for row in nested.unbind()])
print("lengths of the rows:", [len(row) for row in nested.unbind()])
for name, function in FUNCTIONS.items():
    found, copied, right = function(nested).item(), function(nested.contiguous()).item(), function(tokens).item()
    print(f"{name}: {found:.2f}; after contiguous() {copied:.2f}; of the real tokens {right:.2f}")
    assert abs(copied - right) < 1e-4 * abs(right)
    assert abs(found - right) > 0.1 * abs(right), "the behaviour has changed"
nested.mean().backward()
of_padding = losses_BT.grad[losses_BT.detach() == 100]
print(f"gradient of mean(): each of {len(of_padding)} tokens of the padding gets {of_padding.max().item():.4f}")
assert (of_padding > 0.01).all(), "the behaviour has changed"
PY
"$PYTHON" "$dir/check.py"
