#!/bin/sh
# Question: torchao's AdamW8bit quantises its state in blocks of 256 weights. Some weights of a block have gradients
#   that are 1,000 times as large as those of the others. How large are the updates of the small ones?
# Guess: about a learning rate, as those of AdamW; too small, if anything, since small states round to zero.
# Seen (torchao 0.18.0, torch 2.13.0, CPU): up to 535 learning rates. The squares of small gradients, a millionth of the
#   block's largest, are rounded to zero, while the averages of the gradients are not, so the update is divided by
#   epsilon alone. AdamWFp8 goes up to 1,160. At 100 times as large, single updates reach 19 and 299. AdamW4bit has no
#   zero for squares: in 20 steps it moves the small weights by 1 learning rate, where AdamW moves them by 8.9 and
#   bitsandbytes' AdamW8bit (0.50.2) by 2.4.
# Hurts: matrices with uneven gradients, such as down projections after a ReLU, where a block holds 256 neurons and some
#   are hardly active. In a ReLU model of 3 layers, trained on English text for 150 steps, AdamW8bit made 9,698 updates
#   of down projections of more than 5 learning rates, up to 213; AdamW none above 2.3.
# Packages: needs a C++ compiler; torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 torchao==0.18.0 bitsandbytes==0.50.2 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import bitsandbytes
import torch
import torchao.optim

optimizers = {
    "torch AdamW": torch.optim.AdamW,
    "torchao AdamW8bit": torchao.optim.AdamW8bit,
    "torchao AdamWFp8": torchao.optim.AdamWFp8,
    "torchao AdamW4bit": torchao.optim.AdamW4bit,
    "bitsandbytes AdamW8bit": bitsandbytes.optim.AdamW8bit,
}


def updates(optimizer, ratio):
    """Of the small weights, in learning rates: the largest single update, and the mean distance moved."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(128, 256))
    optimizer = optimizer([weight], lr=1e-3, weight_decay=0)
    large = torch.zeros(256, dtype=torch.bool)
    large[::64] = True
    largest = 0.0
    for _ in range(20):
        weight.grad = (torch.randn(128, 256, generator=generator) + 0.5) * torch.where(large, 1.0, ratio) * 0.01
        before = weight.detach().clone()
        optimizer.step()
        update = (weight.detach() - before)[:, ~large].abs() / 1e-3
        largest = max(largest, update.max().item())
    return largest, weight.detach()[:, ~large].abs().mean().item() / 1e-3


seen = {}
for name, optimizer in optimizers.items():
    for ratio in (1e-2, 1e-3):
        seen[name, ratio] = updates(optimizer, ratio)
        largest, moved = seen[name, ratio]
        print(f"{name}, ratio {ratio:g}: largest update {largest:.3g}, moved in 20 steps {moved:.3g}")
assert seen["torch AdamW", 1e-3][0] < 1.1
assert seen["torchao AdamW8bit", 1e-3][0] > 100, "the behaviour has changed"
assert seen["torchao AdamWFp8", 1e-3][0] > 100, "the behaviour has changed"
assert seen["torchao AdamW8bit", 1e-2][0] > 5, "the behaviour has changed"
PY
