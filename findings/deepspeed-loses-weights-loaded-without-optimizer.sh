#!/bin/sh
# Question: fine-tuning begins from a DeepSpeed checkpoint, without its optimizer: load_checkpoint(folder,
#   load_optimizer_states=False), or load_module_only=True. Does the model train on from the loaded weights?
# Guess: yes, in all stages of ZeRO. The optimizer's fp32 copies of the weights are made anew from the loaded ones.
# Seen (DeepSpeed 0.19.8, torch 2.13.0, CPU): no in two cases. In bf16 with stage 0 and load_optimizer_states=False, the
#   loaded weights are there, and an evaluation is right, until the first step: it computes the weights from fp32 copies
#   of the random ones, so that even a step with a rate of 0 replaces all of them. With stage 3 and load_module_only=True,
#   in bf16 and fp32, nothing is loaded at all, though load_checkpoint returns the path. No warning is logged. The other
#   cases, stages 0 to 3 in bf16 and fp32, are right.
# Hurts: fine-tuning and continued pretraining, which begin from scratch without a sign but a high loss.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 setuptools wheel
  DS_BUILD_OPS=0 "$PYTHON" -m pip install --quiet --no-compile --no-build-isolation deepspeed==0.19.8
fi
cat >"$dir/check.py" <<'PY'
import logging
import tempfile

import deepspeed
import torch
from deepspeed.utils import logger
from torch import nn

logger.setLevel(logging.ERROR)
deepspeed.init_distributed("gloo")


def initialize(stage, bf16, rate, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    config = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage}}
    config |= {"steps_per_print": 10**9, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def step(engine, bf16):
    inputs = torch.randn(8, 16).to(torch.bfloat16 if bf16 else torch.float32)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()


def weights(engine):
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


seen = {}
for stage in (0, 1, 2, 3):
    for bf16 in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            engine = initialize(stage, bf16, rate=1e-2, seed=0)
            for _ in range(5):
                step(engine, bf16)
            engine.save_checkpoint(folder)
            saved = weights(engine)
            for setting in ({}, {"load_optimizer_states": False}, {"load_module_only": True}):
                engine = initialize(stage, bf16, rate=0.0, seed=1)
                path, _ = engine.load_checkpoint(folder, **setting)
                assert path
                loaded = weights(engine)
                for group in engine.optimizer.param_groups:
                    group["lr"] = 0.0
                step(engine, bf16)
                off = [(w - saved).norm().item() / saved.norm().item() for w in (loaded, weights(engine))]
                name = next(iter(setting), "no setting")
                seen[stage, bf16, name] = off
                text = f"ZeRO {stage}, {'bf16' if bf16 else 'fp32'}, {name}: off by {off[0]:.0%}"
                print(f"{text}, after a step with a rate of 0 by {off[1]:.0%}", flush=True)
not_loaded = {(3, False, "load_module_only"), (3, True, "load_module_only")}
replaced = not_loaded | {(0, True, "load_optimizer_states")}
for key, (loaded, stepped) in seen.items():
    assert loaded > 0.9 if key in not_loaded else loaded < 0.01, "the behaviour has changed"
    assert stepped > 0.9 if key in replaced else stepped < 0.01, "the behaviour has changed"
PY
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 "$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 1 \
  "$dir/check.py" 2>"$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
