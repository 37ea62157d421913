#!/bin/sh
# Question: a DeepSpeed config has an optimizer with a learning rate of 3e-4, and one of its schedulers, WarmupLR,
#   WarmupCosineLR or WarmupDecayLR, with the number of steps only. To which rate does the warm-up go?
# Guess: to 3e-4 in all three, the rate of the optimizer.
# Seen (deepspeed 0.19.8, CPU): WarmupLR and WarmupCosineLR go to 3e-4. WarmupDecayLR goes to 1e-3, the default of its
#   warmup_max_lr; WarmupLR has the same default, and does not use it. There is no message. In all three, the first two
#   steps have a rate of 0, and after them the warm-up is logarithmic by default: the third of ten steps already has 0.3
#   of the rate.
# Hurts: runs that change from a constant rate to one that decays, by the name of the scheduler alone: more than three times
#   the rate. (transformers' Trainer fills in the value only where the config says "auto".)
# Packages: needs a C++ compiler; torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 setuptools wheel
  DS_BUILD_OPS=0 "$PYTHON" -m pip install --quiet --no-compile --no-build-isolation deepspeed==0.19.8
fi
cat > "$dir/check.py" <<'PY'
import logging

import deepspeed
import torch
from deepspeed.utils import logger
from torch import nn

logger.setLevel(logging.ERROR)
deepspeed.init_distributed("gloo")


def rates_of(kind, **options):
    """The rates of 20 steps, 10 of which are warm-up."""
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}}
    config["scheduler"] = {"type": kind, "params": {"warmup_num_steps": 10} | options}
    model = nn.Linear(8, 8)
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    return rates


seen = {}
for kind, options in {
    "WarmupLR": {},
    "WarmupCosineLR": {"total_num_steps": 1000},
    "WarmupDecayLR": {"total_num_steps": 1000},
}.items():
    seen[kind] = rates_of(kind, **options)
    print(f"{kind}: largest rate {max(seen[kind]):.2e}; first four {', '.join(f'{rate:.1e}' for rate in seen[kind][:4])}")
assert abs(max(seen["WarmupLR"]) - 3e-4) < 1e-6 and abs(max(seen["WarmupCosineLR"]) - 3e-4) < 1e-6
assert abs(max(seen["WarmupDecayLR"]) - 1e-3) < 1e-6, "the behaviour has changed"
PY
DS_ACCELERATOR=cpu "$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 1 "$dir/check.py"
