#!/bin/sh
# Question: sequences of different lengths are one nested tensor (layout=torch.jagged), and attention pooling takes a
#   softmax over the tokens of each: scores.softmax(dim=1). Is its gradient that of each sequence alone?
# Guess: yes. The result is right, and dimensions that are not supported raise, as log_softmax does here.
# Seen (torch 2.13.0): the result is right, and the gradient is wrong, without a message. The backward pass takes the
#   softmax to be over the next dimension: over the heads of a token instead of the tokens of a head. With four heads, a
#   sequence of one token gets a gradient, although its softmax is always 1.
# Hurts: attention pooling, routers and contrastive losses on jagged tensors: they train in a wrong direction. Take the
#   softmax row by row (unbind), or of the padded tensor.
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


def pooled(scores_TH, values_TH):
    """Values of one sequence, weighted by a softmax of the scores over its tokens."""
    return (scores_TH.softmax(0) * values_TH).sum(0)


for heads in (1, 4):
    lengths = [3, 1, 5]
    scores = [torch.randn(length, heads, dtype=torch.float64) for length in lengths]
    values = [torch.randn(length, heads, dtype=torch.float64) for length in lengths]
    alone, nested = ([score.clone().requires_grad_() for score in scores] for _ in range(2))

    expected_BH = torch.stack([pooled(*pair) for pair in zip(alone, values)])
    expected_BH.square().sum().backward()

    weights_BTH = torch.nested.as_nested_tensor(nested, layout=torch.jagged).softmax(1)
    found_BH = torch.stack([(weights * value).sum(0) for weights, value in zip(weights_BTH.unbind(), values)])
    found_BH.square().sum().backward()

    found, right = (torch.cat([score.grad for score in group]) for group in (nested, alone))
    of_one = nested[1].grad.abs().max().item()
    print(f"{heads} scores a token: results equal: {torch.allclose(found_BH, expected_BH)}; the gradient is "
          f"{((found - right).norm() / right.norm()).item():.0%} off; that of the sequence of one token: {of_one:.1g}")
    assert torch.allclose(found_BH, expected_BH)
    assert not torch.allclose(found, right), "the behaviour has changed"
    assert heads == 1 or of_one > 0.01, "the behaviour has changed"
PY
"$PYTHON" "$dir/check.py"
