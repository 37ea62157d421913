#!/bin/sh
# Question: AdamW trains bf16 weights with beta2 = 0.999, its default. Gradients are large for 200 steps and a hundredth
#   of that afterwards. Does the average of their squares fall?
# Guess: yes, by half in 693 steps, with some noise from rounding.
# Seen (torch 2.13.0): never. The average is bf16, like the weights, and a step takes 0.1% from it, less than half the
#   distance to the next bf16 number. After 6,000 steps it is 0.196, as after 200; in fp32 it is 0.0007. The last update
#   is 0.023 of the learning rate instead of 0.39. foreach=False, fused=True and optax.adamw with bf16 parameters (optax
#   0.2.8) do the same. With beta2 = 0.95 it falls.
# Hurts: runs with weights in bf16. After a spike, or the large gradients of the first steps, each weight trains at a
#   fraction of the learning rate for the rest of the run. Keep the weights, and so the state, in fp32.
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


def train(dtype, beta2=0.999, **options):
    weight = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, beta2), weight_decay=0, **options)
    squares = {}
    for step in range(1, 6001):
        weight.grad = torch.full_like(weight, 1.0 if step <= 200 else 0.01)
        optimizer.step()
        if step in (200, 1000, 6000):
            squares[step] = optimizer.state[weight]["exp_avg_sq"][0].item()
    state = optimizer.state[weight]
    update = state["exp_avg"][0].item() / squares[6000] ** 0.5  # in learning rates; the bias corrections are near 1
    shown = ", ".join(f"{value:.4f} after {step:,}" for step, value in squares.items())
    print(f"{dtype}, beta2 {beta2}, {options or 'default'}: {shown}; last update {update:.3f}")
    return squares, update


squares, update = train(torch.float32)
assert squares[6000] < 0.001 and update > 0.35
for options in ({}, {"foreach": False}, {"fused": True}):
    squares, update = train(torch.bfloat16, **options)
    assert squares[6000] == squares[200] > 0.19, "the behaviour has changed"
    assert update < 0.03, "the behaviour has changed"
squares, update = train(torch.bfloat16, beta2=0.95)
assert squares[6000] < 0.001
PY
