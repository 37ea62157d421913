#!/bin/sh
# Question: a DeepSpeed run continues with another number of processes, from a universal checkpoint (ds_to_universal). Its
#   model has a frozen matrix and a buffer, such as a count or the bias that balances a router. Has the new run both?
# Guess: yes. The universal checkpoint holds the whole model, and load_checkpoint loads it, as without "load_universal".
# Seen (DeepSpeed 0.19.8, torch 2.13.0, ZeRO 2, and ZeRO 1 alike, from two CPU processes to one): no. Only what the
#   optimizer trains is loaded, exactly. Frozen weights and buffers keep the values with which the new process made the
#   model, here random ones and zeros, though both are in the folder of the universal checkpoint. There is no message, and
#   load_checkpoint returns as usual. Without load_universal, with as many processes as before, both are loaded.
# Hurts: fine-tuning of a part of a model, frozen embeddings, batch norms, routers with a bias, after a change of nodes.
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
import json
import logging
import sys

import deepspeed
import torch
from deepspeed.utils import logger, safe_get_full_fp32_param
from torch import nn

mode, stage, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
logger.setLevel(logging.ERROR)
deepspeed.init_distributed("gloo")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += self.training
        return self.frozen(self.trained(x)).square().mean()


torch.manual_seed(0 if mode == "save" else 1)  # the new process makes the model with other random weights
model = Model()
processes = torch.distributed.get_world_size()
config = {"train_micro_batch_size_per_gpu": 8 // processes, "zero_optimization": {"stage": stage}}
config |= {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
config |= {"checkpoint": {"load_universal": mode == "universal"}}
optimizer = torch.optim.AdamW([model.trained.weight], lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
if mode == "save":
    for _ in range(5):
        engine.backward(engine(torch.randn(8 // processes, 16)))
        engine.step()
    engine.save_checkpoint(folder)
else:
    path, _ = engine.load_checkpoint(folder, tag="universal" if mode == "universal" else None)
    assert path
state = {
    "trained": safe_get_full_fp32_param(model.trained.weight).tolist(),
    "frozen": model.frozen.weight.tolist(),
    "steps": model.steps.item(),
}
if torch.distributed.get_rank() == 0:
    if mode == "save":
        json.dump(state, open(f"{folder}/state.json", "w"))
    else:
        saved = json.load(open(f"{folder}/state.json"))
        same = {name: saved[name] == state[name] for name in state}
        print(f"stage {stage}, {mode}: as saved:", ", ".join(f"{name} {value}" for name, value in same.items()), flush=True)
        right = all(same.values()) if mode == "load" else same == {"trained": True, "frozen": False, "steps": False}
        assert right, "the behaviour has changed"
PY
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1; export DS_ACCELERATOR OMP_NUM_THREADS
run() { # the number of processes, the mode, the stage, the folder
  processes=$1; shift
  "$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node "$processes" "$dir/check.py" "$@" \
    2>"$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
}
folder="$dir/checkpoint"
mkdir "$folder"
run 2 save 2 "$folder"
run 2 load 2 "$folder"
"$PYTHON" -W ignore -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
  --input_folder "$folder/global_step5" --output_folder "$folder/universal" >"$dir/log" 2>&1 ||
  { tail -n 20 "$dir/log"; exit 1; }
echo "in the universal checkpoint:" $(ls "$folder/universal/zero")
run 1 universal 2 "$folder"
