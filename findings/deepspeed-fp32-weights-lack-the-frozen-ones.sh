#!/bin/sh
# Question: a model with a frozen matrix is trained by DeepSpeed with ZeRO 1, and its fp32 weights are collected from the
#   checkpoint: zero_to_fp32.py, get_fp32_state_dict_from_zero_checkpoint or load_state_dict_from_zero_checkpoint, with
#   exclude_frozen_parameters=False where that is a setting. Is the frozen matrix among them?
# Guess: yes, as with ZeRO 2 and 3; leaving it out is what exclude_frozen_parameters=True is for.
# Seen (DeepSpeed 0.19.8, torch 2.13.0, CPU): with ZeRO 2, yes; with ZeRO 1, no. Checkpoints store the frozen weights for
#   this purpose only if gradients are partitioned, from ZeRO 2 on. The only sign is the number of parameters that is
#   printed. load_state_dict_from_zero_checkpoint loads with strict=False, so the model that it returns has its trained
#   weights, and random ones where they were frozen.
# Hurts: whoever evaluates, exports or fine-tunes what ZeRO 1 has trained with a frozen part.
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
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, load_state_dict_from_zero_checkpoint
from torch import nn

logger.setLevel(logging.ERROR)
deepspeed.init_distributed("gloo")


def collected(stage):
    """After some steps of ZeRO: whether the fp32 weights hold each matrix, and whether a new model gets it from them."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight.requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage}, "steps_per_print": 10**9}
    optimizer = torch.optim.AdamW([model[0].weight], lr=1e-2)
    config |= {"zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(5):
        engine.backward(engine(torch.randn(8, 16)).square().mean())
        engine.step()
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        weights = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=False)
        new = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        new = load_state_dict_from_zero_checkpoint(new, folder)
    held = tuple(f"{i}.weight" in weights for i in (0, 1))
    return held, tuple(torch.equal(new[i].weight, model[i].weight) for i in (0, 1))


seen = {stage: collected(stage) for stage in (1, 2)}
for stage, (held, loaded) in seen.items():
    print(f"ZeRO {stage}: trained held {held[0]}, loaded {loaded[0]}; frozen held {held[1]}, loaded {loaded[1]}")
assert seen[2] == ((True, True), (True, True))
assert seen[1] == ((True, False), (True, False)), "the behaviour has changed"
PY
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 "$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 1 \
  "$dir/check.py" 2>"$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
