#!/bin/sh
# Question: a DeepSpeed config has no "gradient_clipping". The optimizer is SGD with a learning rate of 1, and the gradient
#   has a norm of 64. How far does a step move the weights?
# Guess: by 64. Clipping is off unless one asks for it, as in torch, accelerate and Lightning.
# Seen (deepspeed 0.19.8, torch 2.13.0, CPU): by 1. The default is a largest norm of 1.0, at all stages of ZeRO and stage 0,
#   in fp32 and bf16. get_global_grad_norm() says 64, the norm before clipping, or None at stage 0 in fp32, so that a log
#   does not show it either. "gradient_clipping": 0.0 turns it off. A comment in its code says so; no message does.
# Hurts: comparisons with the same loop without DeepSpeed, and losses that are sums or not scaled to 1: with SGD, every step
#   has the same length; with Adam, large gradients early in training and rare batches count for less. Loops that clip by
#   themselves, to a larger norm, are clipped again.
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
from deepspeed.utils import logger, safe_get_full_fp32_param
from torch import nn

logger.setLevel(logging.ERROR)
deepspeed.init_distributed("gloo")


def distance(stage, bf16, **options):
    """How far one step of SGD moves the weights, and the norm that DeepSpeed reports."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config | options
    )
    ones = torch.ones(1, 64, dtype=torch.bfloat16 if bf16 else torch.float32)
    engine.backward(engine(ones).float().sum())  # every entry of the gradient is 1
    engine.step()
    weight = safe_get_full_fp32_param(model.weight) if stage else model.weight.detach().float()
    return weight.norm().item(), engine.get_global_grad_norm()


seen = {}
for stage in (0, 1, 2, 3):
    for bf16 in (False, True):
        for name, options in {"no setting": {}, "gradient_clipping 0": {"gradient_clipping": 0.0}}.items():
            seen[stage, bf16, name], norm = distance(stage, bf16, **options)
            moved = f"moved by {seen[stage, bf16, name]:g}, reported norm {norm if norm is None else float(norm)}"
            print(f"stage {stage}, {'bf16' if bf16 else 'fp32'}, {name}: {moved}", flush=True)
for (_, _, name), moved in seen.items():
    assert abs(moved - (1 if name == "no setting" else 64)) < 1e-2, "the behaviour has changed"
PY
DS_ACCELERATOR=cpu "$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 1 "$dir/check.py"
