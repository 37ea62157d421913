#!/bin/sh
# Question: x.bfloat16().float() rounds x to bf16, and x - x.bfloat16().float() is what the rounding lost. Kahan summation
#   keeps that loss in a second tensor, so that bf16 weights can take small updates. Does it work under torch.compile?
# Guess: yes. A cast that the program asks for is made; only the order of sums may differ.
# Seen (torch 2.13.0, CPU): no. The compiler computes bf16 in fp32 and removes pairs of casts, so the loss is exactly
#   zero, and with it the compensation. 100 updates of 0.001 move a bf16 weight of 1 to 1.10 in eager mode; compiled,
#   they leave it at 1. An fp16 overflow to infinity disappears too. Casts to e4m3 are made. With
#   torch._inductor.config.emulate_precision_casts = True, all results are those of eager mode.
# Hurts: optimizers for bf16 weights with Kahan summation or error feedback that are compiled for speed: small updates
#   are lost as if there were no compensation. And studies that simulate bf16, or look for overflows of fp16.
# Packages: needs a C++ compiler; torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0
fi
"$PYTHON" - <<'PY'
import torch
from torch._inductor import config


def lost(x):
    return x - x.bfloat16().float()


def lost_in_fp8(x):
    return x - x.to(torch.float8_e4m3fn).float()


def kahan(weight, compensation, update):
    """Adds an update to a bf16 weight; what the rounding loses is added next time."""
    compensation = compensation + update
    new = weight + compensation
    return new, compensation - (new - weight)


def trained(add):
    weight, update = torch.ones(64, dtype=torch.bfloat16), torch.full((64,), 0.001, dtype=torch.bfloat16)
    compensation = torch.zeros_like(weight)
    for _ in range(100):
        weight, compensation = add(weight, compensation, update)
    return weight[0].item()


def doubled(x):
    return (x.half() * 2).float()


def results(wrap):
    x = torch.linspace(-3, 3, 1001)
    return {
        "largest loss of rounding to bf16": wrap(lost)(x).abs().max().item(),
        "largest loss of rounding to e4m3": wrap(lost_in_fp8)(x).abs().max().item(),
        "weight after 100 updates of 0.001": trained(wrap(kahan)),
        "60,000 doubled in fp16": wrap(doubled)(torch.full((64,), 60000.0))[0].item(),
    }


eager, compiled = results(lambda function: function), results(torch.compile)
torch.compiler.reset()
config.emulate_precision_casts = True
emulated = results(torch.compile)
for name in eager:
    print(f"{name}: eager {eager[name]:.6g}, compiled {compiled[name]:.6g}, "
          f"with emulate_precision_casts {emulated[name]:.6g}")
assert eager == emulated
values = list(compiled.values())
assert values[1] == eager["largest loss of rounding to e4m3"]
assert values[0] == 0 and values[2:] == [1, 120000], "the behaviour has changed"
PY
